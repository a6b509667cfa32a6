"""Observability: metrics, counters, traces and the fields of log lines."""
