"""The sinks of pipelines, one file each."""
