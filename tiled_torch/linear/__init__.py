"""`TiledLinear`: one large linear layer as a grid of tiles."""
