"""Sinks of pipelines, one module each."""
