"""One file for each kind of stored data."""
