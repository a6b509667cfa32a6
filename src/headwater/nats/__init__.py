"""The door to NATS JetStream: changes and snapshots as messages, and a replica that is built from them."""
