"""Reads and writes the checkpoint formats of other libraries, one module for each format."""
