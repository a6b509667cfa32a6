"""The HTTP server: the API, server-sent events and the console."""
