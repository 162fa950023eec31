"""`plan` and `fits` as functions of a model object: what both halves check, and what they return."""
