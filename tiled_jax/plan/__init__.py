"""`plan` and `fits`: how long a context fits, of a model object."""
