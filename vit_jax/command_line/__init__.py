"""What the programs share: flags, one-line errors."""
