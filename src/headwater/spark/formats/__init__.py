"""Spark data sources: the log, captured changes, tables and NATS."""
