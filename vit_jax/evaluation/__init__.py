"""Accuracy of heads, few-shot linear probes, kNN, logistic regression, and episodes."""
