"""Distillation of one language-model head by another, a shard of the logits of both at a time."""
