"""The truth, in float64 NumPy, one straight line per formula."""
