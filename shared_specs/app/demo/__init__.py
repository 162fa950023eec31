"""`make demo`: plain against tiled in both halves."""
