"""What is kept of a run, and how another run begins with it."""
