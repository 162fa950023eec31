"""Bytes of a decoder whose layers run a shard of tokens at a time but for attention (scope="block"), as formulas.

Letters: T tokens, H hidden, A and K the columns of all query heads and of all key heads.
"""

from math import ceil
from typing import Any

from shared_specs.layers.heads import attention_turns

WIDE = 4  # bytes of the float32 residual stream, and of sums
# Where cuDNN attends: rows of queries, of all heads of a group together, that a group of heads has at least. Several times
# what a GPU computes at once.
GROUP_ROWS = 2**17
WINDOW_BLOCK_TOKENS = 1024  # queries that PyTorch attends with at once where there is a window, or a cap of scores


def block_row_bytes(
    *,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    kept_layers: int = 0,
    stream: int = WIDE,
    tensor: int = 1,
) -> int:
    """Return the temporary bytes that one more token costs the compiled (XLA) forward and backward, whatever the layers.

    At the peak, attention's backward: the layer's input and the gradient of its result (H each, in the dtype of the residual
    stream); q, over which its gradient is written, k and v; the gradient of attention's output, written over it; float32 sums
    of dk and dv; of every head and token the log-sum-exp and the sum of the output times its gradient; position, token and
    label. The layers' inputs come on top where they do not wait in host memory.

    Args:
        itemsize: bytes of the dtype of the products. kept_layers: layers whose inputs stay on the device.
        stream: bytes of the dtype of the residual stream.
        tensor: devices that split the weights, and with sequence parallelism the tokens between the split layers.
    """
    queries, keys, wide = heads * head_dim // tensor, kv_heads * head_dim // tensor, max(WIDE, itemsize)
    rows = (2 + kept_layers) * (hidden // tensor) * stream
    attention = (2 * queries + 2 * keys) * itemsize + 2 * keys * wide + 2 * (heads // tensor) * wide
    return rows + attention + 3 * 4


def attention_groups(rows: int, heads: int, kv_heads: int) -> int:
    """Return in how many groups of key heads cuDNN attends, each with its query heads. rows: of all sequences together."""
    fewest = min(kv_heads, ceil(GROUP_ROWS / max(1, rows * (heads // kv_heads))))
    return next(kv_heads // size for size in range(fewest, kv_heads + 1) if kv_heads % size == 0)


def cudnn_block_row_bytes(
    *,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    groups: int,
    kept_layers: int = 0,
    stream: int = WIDE,
    tensor: int = 1,
) -> int:
    """Return the same where cuDNN attends, in `groups` groups of heads.

    At the peak, in attention's backward: the layer's input and the gradient of its result; q, k and v; attention's output and
    its gradient; of every head and token the log-sum-exp; position, token and label. Of a group: what cuDNN works with, which
    is dq in float32, dk and dv of every query head and two numbers a head, and the group's gradients; of one of several
    groups its q, k, v, output and gradient as well.
    """
    queries, keys, n = heads * head_dim // tensor, kv_heads * head_dim // tensor, heads // tensor
    rows = (2 + kept_layers) * (hidden // tensor) * stream
    operands, outputs = (queries + 2 * keys) * itemsize, 2 * queries * itemsize
    of_group = (WIDE + 2 * itemsize) * queries + 2 * n * WIDE + operands
    of_group += operands + outputs if groups > 1 else 0
    return rows + operands + outputs + n * WIDE + 3 * 4 + ceil(of_group / groups)


def eager_block_row_bytes(**sizes: Any) -> int:
    """Return the bytes that one more token costs PyTorch's forward and backward, whatever the layers.

    The larger of `eager_block_moments`, whose arguments these are.
    """
    return max(eager_block_moments(**sizes))


def eager_block_moments(
    *,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    kept_layers: int = 0,
    tensor: int = 1,
    sequence_parallel: bool = True,
    exchanging: int = 1,
    ring: bool = False,
    value_dim: int | None = None,
) -> tuple[int, int]:
    """Return the bytes that one more token costs two moments of a layer's backward in PyTorch: attention's, and behind it.

    In both there are the gradients of its result and of its input (H each), q, k and v, attention's output as its backward
    wants it and once more, where its gradient is written over it, the log-sum-exp of every head, cosine and sine. Behind
    attention its input as well; in attention's backward the gradients of what attends at once. The layers' inputs come on top
    where they do not wait in host memory.

    Ranks that exchange tokens for heads have as much: of q, k, v and attention's output all tokens of their own heads are there
    in place of their own tokens of all heads. Of key heads that do not reach for all ranks there are copies.

    Args:
        itemsize: bytes of the dtype of the model. kept_layers: layers whose inputs stay on the device.
        tensor, sequence_parallel: ranks that split the weights, and whether they split the tokens between the split layers.
        exchanging: ranks that exchange tokens for heads. ring: their keys and values travel in a ring besides.
        value_dim: of a head of values, and of attention's output; None: as of queries and keys.
    """
    turns = attention_turns(heads // tensor, kv_heads // tensor, exchanging, parts=not ring)
    of_value = head_dim if value_dim is None else value_dim
    queries, outputs = heads * head_dim // tensor, heads * of_value // tensor
    keys = kv_heads * (head_dim + of_value) // tensor * turns.copies  # and values
    own = hidden // tensor if sequence_parallel else hidden
    both = 2 * own + queries + 2 * outputs + keys + 2 * head_dim
    behind = max(kept_layers, 1) * own
    attention = kept_layers * own + queries // turns.count + keys // turns.groups
    lse = heads // tensor * WIDE
    return (both + attention) * itemsize + lse, (both + behind) * itemsize + lse
