"""Builds, compiles and runs one experiment in a work directory."""
