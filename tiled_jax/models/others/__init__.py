"""MLPs in Flax modules of others: what they look like, what a probe shows of them, and their call once they are tiled."""
