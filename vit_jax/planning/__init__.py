"""Memory and compile time of an experiment, also on devices that are not attached."""
