"""Data pipeline: from stored images to augmented batches on the devices."""
