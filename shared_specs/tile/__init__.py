"""`tile` and `tiled_loss`: checks, and losses that are means."""
