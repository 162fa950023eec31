"""`check`: a training step of the user's own, tiled and untiled, compared tensor by tensor."""
