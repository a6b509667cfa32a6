"""The log: publish, follow, topics, cursors, schedules, and what a consumer does next."""
