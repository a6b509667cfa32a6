"""Headwater in the form of other libraries: one module each. Nothing else imports them."""
