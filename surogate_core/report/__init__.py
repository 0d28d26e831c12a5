"""The report of a run, or of several: made from the files in their directories, also after a crash."""
