"""Messages and services, as modules: generated from the files in proto by tools/protos.py."""
