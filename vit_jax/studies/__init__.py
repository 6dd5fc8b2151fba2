"""Plans the runs of a study, reads their metrics, and tabulates the results."""
