"""Shared by the programs: arguments, configurations from files, one-line errors."""
