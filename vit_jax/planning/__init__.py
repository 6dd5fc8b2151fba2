"""Measures memory and compile time of an experiment, also for devices that are not attached."""
