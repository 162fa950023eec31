"""Whole models: a decoder of Llama's kind that loads Hugging Face weights without PyTorch, and writes."""

from tiled_jax.layers.attention import causal_attention
from tiled_jax.models.config import LlamaConfig
from tiled_jax.models.generate import generate
from tiled_jax.models.llama import Llama
from tiled_jax.models.loss import next_token_loss, summed_next_token_loss
from tiled_jax.models.weights import from_hf, to_hf

__all__ = [
    "Llama",
    "LlamaConfig",
    "causal_attention",
    "from_hf",
    "generate",
    "next_token_loss",
    "summed_next_token_loss",
    "to_hf",
]
