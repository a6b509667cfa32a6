"""Replays past events from the log and its archives to a target."""
