"""Fault-injection tests of the log. Only `headwater chaos` and the test suite import this package."""
