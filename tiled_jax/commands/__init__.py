"""The commands behind `python -m tiled_jax`."""
