"""The bridge from captured changes to NATS JetStream."""
