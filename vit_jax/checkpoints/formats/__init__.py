"""Checkpoints of other systems: one file for each format."""
