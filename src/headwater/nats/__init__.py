"""NATS JetStream: captured changes and snapshots as messages, and replicas that are built from them."""
