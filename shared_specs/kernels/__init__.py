"""Block sizes of the kernels, and a model of the time they take."""
