"""From stored images to batches on the devices."""
