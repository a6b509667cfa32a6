"""The log: publish, read, follow, topics, cursors and schedules."""
