"""The servers: HTTP with its console, gRPC and Kafka, and what they share."""
