"""Tasks: what a run learns, and how it is measured. One file per task."""
