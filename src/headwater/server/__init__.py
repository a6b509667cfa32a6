"""The doors that a server has beside Kafka's: HTTP with its console, gRPC, webhooks."""
