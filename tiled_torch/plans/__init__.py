"""`parallelize`: what a finished model is split by, and in which order."""
