"""The Kafka door: the log as a Kafka broker. It holds no truth of its own; everything is rows in Postgres."""
