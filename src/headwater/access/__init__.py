"""Access: accounts, permissions, passwords and API keys, the same for every server."""
