"""The database: connections to it, and how calls are run on them."""
