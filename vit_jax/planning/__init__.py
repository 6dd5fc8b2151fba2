"""Memory and time to compile of an experiment, also for devices that are not here."""
