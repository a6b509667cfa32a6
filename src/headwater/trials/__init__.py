"""Trials of the log. Never imported by a program that only publishes."""
