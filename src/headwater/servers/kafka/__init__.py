"""The Kafka server: exposes the log as a Kafka broker. It is stateless; all data is in Postgres."""
