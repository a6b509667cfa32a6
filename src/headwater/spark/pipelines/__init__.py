"""Pipelines: the file that declares them, and running them."""
