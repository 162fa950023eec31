"""What ranks say to each other: groups, collectives with gradients, tokens gathered shard by shard."""
