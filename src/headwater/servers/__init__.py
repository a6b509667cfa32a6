"""The servers of the log: HTTP with its console, gRPC and Kafka, and what they share."""
