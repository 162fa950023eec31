"""A mixture of experts: a router and its experts, a shard of tokens at a time."""
