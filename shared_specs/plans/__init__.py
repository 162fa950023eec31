"""`parallelize`: checks of its configuration, and what was applied in words."""
