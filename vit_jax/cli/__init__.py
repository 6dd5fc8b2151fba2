"""The command line of all programs: flags, configuration files, help and output."""
