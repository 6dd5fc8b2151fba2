"""The figures of two papers from any network: what is computed, and how it is drawn."""
