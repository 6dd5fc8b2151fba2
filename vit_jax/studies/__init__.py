"""Many experiments as one study: its runs, and their results."""
