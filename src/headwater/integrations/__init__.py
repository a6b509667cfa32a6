"""Headwater with other libraries: one module each. Nothing else imports them, and each needs its own extra."""
