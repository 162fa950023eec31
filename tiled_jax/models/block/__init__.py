"""A decoder layer of which everything but attention runs a shard of tokens at a time."""
