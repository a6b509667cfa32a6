"""The version of this program. A database that a newer program upgraded keeps its newer functions."""

VERSION = "0.1.0"
