"""What is tiled, against itself untiled: a module (`verify`) or a whole training (`check`)."""
