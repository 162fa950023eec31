"""The tiled MLP: gate, up, activation and down, a shard of tokens at a time."""
