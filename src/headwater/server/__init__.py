"""The server: doors of the log that speak HTTP."""
