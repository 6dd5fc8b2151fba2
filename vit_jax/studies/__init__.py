"""Reads the files of runs, plans the runs of a study, and tabulates the results."""
