"""Bytes of attention's backward in PyTorch where the ranks of a context share sequences."""

from math import lcm

from shared_specs.app.models.decoders import DECODERS
from shared_specs.app.plan.decoder import MASTER, Decoder
from shared_specs.app.plan.setting import Setting
from shared_specs.layers.block_costs import WIDE


def exchanged_row_bytes(decoder: Decoder, setting: Setting) -> int:
    """Return the bytes that one more token costs attention's backward where the ranks of a context share sequences.

    Where they exchange tokens for heads, q, k and v with the heads of a rank, and attention's output; key heads that are
    repeated, where there are fewer of them than ranks, are gone by then. XLA has room for all this in what is there, and with
    scope="block" it is there in place of what it was made of (`eager_block_moments`). In places of a ring it is what the ring
    counts.
    """
    if setting.ring > 1:
        return ring_row_bytes(decoder, setting)
    if setting.context == 1 or setting.scope == "block":
        return 0
    return (2 * decoder.queries + 2 * decoder.keys) * setting.itemsize


def ring_row_bytes(decoder: Decoder, setting: Setting) -> int:
    """Return the bytes that one more token costs attention's backward in a ring, on the rank with most.

    There are dq and this rank's own dk and dv, in float32, and with more than two ranks those of two others, of which one is on
    its way, there and here; k and v of the next rank, on their way; and of one part the operands as kernels want them and what
    they return, beside that of the part before. The first of all parts is causal, for which a CPU's kernel wants key heads
    repeated. With scope="block" all this is of one key-value group, whose gradients are counted without a ring as well. Ranks
    that exchange tokens for heads have as many more of the tokens as they have fewer heads; key heads that do not reach for all
    of them are repeated, and a group is one head of a rank.

    In transformers' layers all key heads are at work at once. Where they have several query heads each, kernels want them in an
    order of their own, of both ranks in a ring of more than two. If not, a ring of two has its peak behind the kernel, where
    there are three float32 sums.
    """
    b, block = setting.itemsize, setting.scope == "block"
    copies = lcm(decoder.kv_heads, setting.exchanging) // decoder.kv_heads
    groups = max(1, decoder.kv_heads // setting.exchanging) if block else 1
    queries, keys = decoder.queries // groups, 2 * copies * decoder.keys // groups
    # Arrays of keys and values in float32, and halves of such arrays in the dtype of the products.
    sums, halves = 4 if setting.ring > 2 else 2, 6
    if not block and decoder.heads > copies * decoder.kv_heads:
        halves += 2 if setting.ring > 2 else 1
    elif not block and setting.ring == 2:
        sums, halves = 4, 1
    later = (WIDE + 5 * b) * queries + (sums * WIDE + halves * b // 2) * keys
    first = (WIDE + 6 * b) * queries + (WIDE + 3 * b) * keys if setting.device == "cpu" else 0
    return max(first, later) - (b * (queries + keys) if block else 0)


def beside_ring_row_bytes(decoder: Decoder, setting: Setting) -> int:
    """Return the bytes that one more token costs beside a ring's backward in one of transformers' layers.

    What the norm before it keeps (in 16 bits its input in float32, and what is normed, before and after its weight), the
    gradient behind it, q, k and v in part and attention's output; in the first part of a CPU, which is causal, two rows more.
    With a large H a layer has its peak elsewhere.
    """
    itemsize = setting.itemsize
    hidden = (5 if itemsize < MASTER else 3) + 2 * (setting.device == "cpu")
    both = 4 * decoder.heads + head_norm_row_bytes(decoder, itemsize)
    return (hidden * decoder.hidden + 2 * decoder.queries) * itemsize + both


def head_norm_row_bytes(decoder: Decoder, itemsize: int) -> int:
    """Return the bytes that one more token costs the norms of heads in one of transformers' layers.

    Of queries and keys what is normed in float32, for a weight that is trained also rounded, and of every head a number.
    """
    rounded = itemsize if decoder.held is None or decoder.held.trains_norms else 0
    found = (decoder.queries + decoder.keys) * (WIDE + rounded) + (decoder.heads + decoder.kv_heads) * WIDE
    return found if DECODERS[decoder.kind].head_norms else 0
