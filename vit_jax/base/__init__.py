"""What everything stands on: records, names of leaves, shapes, errors, files written whole."""
