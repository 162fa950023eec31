"""Bytes of a decoder whose layers run a shard of tokens at a time but for attention (scope="block"), as formulas.

Letters: T tokens, H hidden, A and K the columns of all query heads and of all key heads.
"""

WIDE = 4  # bytes of the float32 residual stream, and of sums


def block_row_bytes(
    *, hidden: int, heads: int, kv_heads: int, head_dim: int, itemsize: int, kept_layers: int = 0, stream: int = WIDE
) -> int:
    """Return the temporary bytes that one more token costs the compiled (XLA) forward and backward, whatever the layers.

    At the peak, attention's backward: the layer's input and the gradient of its result (H each, in the dtype of the residual
    stream); q, over which its gradient is written, k and v; the gradient of attention's output, written over it; float32 sums
    of dk and dv; of every head and token the log-sum-exp and the sum of the output times its gradient; position, token and
    label. The layers' inputs come on top where they do not wait in host memory.

    Args:
        itemsize: bytes of the dtype of the products. kept_layers: layers whose inputs stay on the device.
        stream: bytes of the dtype of the residual stream.
    """
    queries, keys, wide = heads * head_dim, kv_heads * head_dim, max(WIDE, itemsize)
    rows = (2 + kept_layers) * hidden * stream
    attention = (2 * queries + 2 * keys) * itemsize + 2 * keys * wide + 2 * heads * wide
    return rows + attention + 3 * 4


def eager_block_row_bytes(
    *, hidden: int, heads: int, kv_heads: int, head_dim: int, itemsize: int, kept_layers: int = 0
) -> int:
    """Return the bytes that one more token costs PyTorch's forward and backward, whatever the layers.

    The larger of `eager_block_moments`, whose arguments these are.
    """
    sizes = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return max(eager_block_moments(**sizes, itemsize=itemsize, kept_layers=kept_layers))


def eager_block_moments(
    *, hidden: int, heads: int, kv_heads: int, head_dim: int, itemsize: int, kept_layers: int = 0
) -> tuple[int, int]:
    """Return the bytes that one more token costs two moments of a layer's backward in PyTorch: attention's, and behind it.

    In both there are the gradients of its result and of its input (H each), q, k and v, attention's output as its backward
    wants it and once more, where its gradient is written over it, the log-sum-exp of every head, cosine and sine. Behind
    attention its input as well; in attention's backward the gradients of one key-value group. The layers' inputs come on top
    where they do not wait in host memory.

    Args:
        itemsize: bytes of the dtype of the model. kept_layers: layers whose inputs stay on the device.
    """
    queries, keys = heads * head_dim, kv_heads * head_dim
    both = 2 * hidden + 3 * queries + 2 * keys + 2 * head_dim
    behind = max(kept_layers, 1) * hidden
    attention = kept_layers * hidden + (queries + 2 * keys) // kv_heads
    return (both + attention) * itemsize + heads * WIDE, (both + behind) * itemsize + heads * WIDE
