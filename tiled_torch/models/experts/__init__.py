"""Mixtures of experts: the experts of a Hugging Face model and their routers, a shard of tokens at a time."""
