"""The formats of Spark: the log, captured changes, tables, NATS."""
