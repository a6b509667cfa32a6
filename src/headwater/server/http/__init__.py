"""HTTP: the log for programs and for people, and the registry of schemas."""
