"""Pipelines: the file that declares them, and the runner."""
