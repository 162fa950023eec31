"""`tile`: any token-wise function, a shard of tokens at a time."""
