"""What a model has learned, in numbers: the analyses of the ViT paper and of Raghu et al."""
