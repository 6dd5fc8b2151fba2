"""What a network has learned, in numbers: the figures of the ViT paper and of Raghu et al."""
