"""Megatron-core's cross entropy of logits whose vocabulary is split over ranks, with its label smoothing."""

from typing import Any

from torch import Tensor

from shared_specs.errors import fail
from tiled_torch.collectives.groups import rank_group
from tiled_torch.compat.megatron.parallel_state import group_or_default
from tiled_torch.loss import ranks

_NAME = "vocab_parallel_cross_entropy"


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None
) -> Tensor:
    """Return the cross entropy of each token, with Megatron-core's label smoothing ε.

    The target gets the probability 1 - ε, every other entry ε / (V - 1), V the whole vocabulary.

    Args:
        vocab_parallel_logits: [*tokens, V / R], this rank's entries; left as they are.
        target: [*tokens], the same on every rank; -100 where there is none.
        label_smoothing: in [0, (V - 1) / V], where the target is as likely as any other entry.
        tp_group: the tensor-parallel group; None: `parallel_state`'s.
    Returns:
        [*tokens], float32 (float64 for float64), the same on every rank.
    Memory, Raises: as `tiled_torch.vocab_parallel_cross_entropy`.
    Source: named and called as Megatron-core's (core/tensor_parallel/cross_entropy.py), which takes V / R for V here.
    """
    group = group_or_default(tp_group)
    if label_smoothing and isinstance(vocab_parallel_logits, Tensor) and isinstance(label_smoothing, float):
        vocab = vocab_parallel_logits.shape[-1] * rank_group(_NAME, group).size
        if vocab < 2 or not 0 <= label_smoothing <= (vocab - 1) / vocab:
            fail(_NAME, "label_smoothing", f"in [0, {vocab - 1}/{vocab}]", label_smoothing)
        label_smoothing = label_smoothing * vocab / (vocab - 1)
    return ranks.vocab_parallel_cross_entropy(vocab_parallel_logits, target, min(label_smoothing, 1.0), group=group)
