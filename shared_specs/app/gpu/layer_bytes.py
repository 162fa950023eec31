"""Bytes of a few decoder layers with scope="block", forward and backward, as the formulas say them, in either half."""

from typing import Any

from shared_specs.app.plan.decoder import MASTER, Decoder
from shared_specs.app.plan.moments.eager import BLOCK_ARRAYS
from shared_specs.layers.block_costs import (
    attention_groups,
    block_row_bytes,
    cudnn_block_row_bytes,
    eager_block_row_bytes,
)
from shared_specs.mlp.costs import MLPShape, compiled_peak_bytes
from shared_specs.shards import ShardPlan


def _sizes(decoder: Decoder, itemsize: int, kept: int) -> dict[str, Any]:
    names = ("hidden", "heads", "kv_heads", "head_dim")
    return {name: getattr(decoder, name) for name in names} | {"itemsize": itemsize, "kept_layers": kept}


def eager_layers_bytes(decoder: Decoder, tokens: int, shard_tokens: int, itemsize: int, *, offload: bool) -> int:
    """Return PyTorch's peak beyond x, the gradient of the result and the weights. tokens: of one sequence."""
    row = eager_block_row_bytes(**_sizes(decoder, itemsize, 0 if offload else decoder.layers))
    # That gradient, and x where the formula counts every layer's input.
    there = (1 if offload else 2) * decoder.hidden * itemsize
    sums = MASTER * decoder.layer_parameters + decoder.layers * decoder.layer_parameters * itemsize
    return (row - there) * tokens + BLOCK_ARRAYS * shard_tokens * decoder.intermediate * itemsize + sums


def compiled_layers_bytes(
    decoder: Decoder, tokens: int, shard_tokens: int, itemsize: int, *, offload: bool, device: str, cudnn: bool
) -> int:
    """Return the temporary bytes of XLA's program. cudnn: whether cuDNN attends, as on a GPU in 16 bits."""
    sizes = _sizes(decoder, itemsize, 0 if offload else decoder.layers)
    groups = attention_groups(tokens, decoder.heads, decoder.kv_heads)
    row = cudnn_block_row_bytes(**sizes, groups=groups) if cudnn else block_row_bytes(**sizes)
    hidden, intermediate = decoder.hidden, decoder.intermediate
    mlp = MLPShape(tokens=tokens, hidden=hidden, intermediate=intermediate, itemsize=itemsize, weight_itemsize=itemsize)
    of_mlp = compiled_peak_bytes(mlp, ShardPlan(tokens, shard_tokens), device=device)
    # And the sums that this does not count.
    return row * tokens + of_mlp + MASTER * (decoder.layer_parameters - 3 * hidden * intermediate)
