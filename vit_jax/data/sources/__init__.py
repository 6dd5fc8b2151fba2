"""The kinds of stored data, each in its own module."""
