"""What the ranks run for a float16 head that is split over them: errors of gradients at odd scales. See tests/ranks.py."""

from typing import Any

import torch
import torch.nn.functional as F

from shared_specs import LossOptions
from shared_specs.collectives.partitions import vocab_range
from tests.loss.ranks_torch_loss import distance, draw, labels
from tiled_torch.parallel import vocab_parallel_linear_cross_entropy


def head(
    rank: int, world: int, class_scale: float | None = None, z_loss: float = 0.0, sequence_parallel: bool = False
) -> dict[str, float]:
    """Errors against float64 of the gradients of a mean over all tokens."""
    vocab, tokens = 203, 32
    stored = [draw(tokens, 16, seed=0).half(), (draw(vocab, 16, seed=1) / 4).half()]
    class_weight = None if class_scale is None else class_scale * (draw(vocab, seed=2).abs() + 0.1)
    targets = labels(vocab, tokens)
    wide = [a.double().requires_grad_() for a in stored]
    logits, valid = F.linear(*wide), targets != -100
    count = valid.sum() if class_weight is None else (class_weight[targets.clamp(min=0)] * valid).sum()
    exact = F.cross_entropy(logits, targets, weight=class_weight)
    exact = exact + z_loss * (logits.logsumexp(1).square() * valid).sum() / count
    truth = torch.autograd.grad(exact, wide)
    rows = slice(rank * tokens // world, (rank + 1) * tokens // world) if sequence_parallel else slice(None)
    entries = slice(*vocab_range(vocab, world, rank))
    x, weight = (a[part].requires_grad_() for a, part in zip(stored, (rows, entries), strict=True))
    given = None if class_weight is None else class_weight.float()
    value: Any = vocab_parallel_linear_cross_entropy(
        x,
        weight,
        targets[rows],
        loss=LossOptions(class_weight=given, z_loss=z_loss),
        num_shards=4,
        vocab_size=vocab,
        sequence_parallel=sequence_parallel,
    )
    found = torch.autograd.grad(value, [x, weight])
    parts = zip(("dx", "dweight"), found, truth, (rows, entries), strict=True)
    return {name: distance(ours.double(), whole[part]) for name, ours, whole, part in parts}
