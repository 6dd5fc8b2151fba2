"""Computes and draws figures of models (as in two papers) and of training runs."""
