"""The commands behind `python -m tiled_torch`."""
