"""Calls: every SQL function of the log as a value, by subject. The only package that names SQL functions.

No I/O. Import the module of a subject, for example `from headwater.calls import queues`, and run a call with
`Headwater.run`.
"""

from headwater.calls.call import Call

__all__ = ["Call"]
