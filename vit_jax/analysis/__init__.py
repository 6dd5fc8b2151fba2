"""Analyses of trained models, as in the ViT paper and in Raghu et al. 2021."""
