"""What the programs share: arguments, configurations from files, one-line errors."""
