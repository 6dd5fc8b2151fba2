"""Checkpoints: saves and restores runs, downloads checkpoints, and starts from other models."""
