"""One run, on disk and on screen: decided, compiled, running."""
