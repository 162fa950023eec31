"""Whole models: a Llama decoder that loads Hugging Face weights without PyTorch."""

from tiled_jax.layers.attention import causal_attention
from tiled_jax.models.config import LlamaConfig
from tiled_jax.models.llama import Llama
from tiled_jax.models.loss import next_token_loss
from tiled_jax.models.weights import from_hf, to_hf

__all__ = ["Llama", "LlamaConfig", "causal_attention", "from_hf", "next_token_loss", "to_hf"]
