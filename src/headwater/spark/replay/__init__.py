"""Replay: events of the past, from the log and its archive, to a target."""
