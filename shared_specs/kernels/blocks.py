"""Block sizes of the kernels, by op, architecture and shape: read by Triton and by Pallas alike.

Letters of one product: M rows, N columns, K the summed dim; a kernel's program makes one block of `rows` x `columns` of
the result, `depth` of K at a time. What `tune` measured on a user's device is in `user_table()`, what was measured for all in
the project's own tuned_blocks.json; the first of them that has a shape says its blocks, and a shape that is in neither gets
the op's default, whose registers and shared memory a test compares with a table.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from shared_specs.errors import SpecError, error_text

TUNED = Path(__file__).with_name("tuned_blocks.json")
# Names the table of the user; empty: there is none.
VARIABLE = "TILED_TUNED_BLOCKS"

Kernels = Literal["triton", "pallas"]


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """One configuration of a kernel.

    Args:
        rows, columns, depth: of the block, in elements; powers of two. Elementwise kernels have depth 1.
        warps: of a program (Triton) or of its computing warpgroups (Pallas: 4 each).
        stages: blocks of K in flight at once.
        group: block rows that the raster goes through before the next block column, for the L2 cache.
        halves: pieces of the epilogue, a power of two: two need half the registers.
        persistent: Triton: as many programs as the device runs at once, each of which makes several blocks (dgated).
        turns: Pallas: each computing warpgroup has a block of its own, so that the epilogue of one runs beside the products
            of another; else they share the rows of one block.
        resident: Pallas's cross entropy: programs of a multiprocessor, each of which makes row after row; 0: one a row.
        cluster: Pallas: neighbouring block rows of so many programs, which copy the weights of their block column once.
    """

    rows: int
    columns: int
    depth: int = 1
    warps: int = 8
    stages: int = 4
    group: int = 8
    halves: int = 1
    persistent: bool = False
    turns: bool = False
    resident: int = 0
    cluster: int = 1


@dataclass(frozen=True, kw_only=True)
class Paths:
    """Who makes which product of the MLP: the vendor's library, or a kernel of the project's own.

    Args:
        up: gate and up, then h. "vendor": two products and one elementwise pass; "auxiliary": a vendor's product for
            gate, a kernel for up and h; "dual": one kernel for both.
        down: dh, then dgate, dup and h. "vendor": a product and one elementwise pass; "dgated": one kernel.
        weight_gradient: sums over shards in float32. products: everything else.
    """

    up: Literal["vendor", "auxiliary", "dual"] = "vendor"
    down: Literal["vendor", "dgated"] = "dgated"
    weight_gradient: Literal["vendor", "kernel"] = "vendor"
    products: Literal["vendor", "kernel"] = "vendor"


# Every addition in an order of the project's own.
DETERMINISTIC = Paths(up="dual", down="dgated", weight_gradient="kernel", products="kernel")
# IEEE float32 products use no tensor cores in Triton, so the vendor's are the faster ones whatever the shape.
FLOAT32 = Paths(up="vendor", down="vendor")
# Not measured yet: the vendor's products and one elementwise pass, which cannot lose. A fused down-projection has to reach
# 79% of the vendor's rate to pay, a fused up-projection 94%.
UNMEASURED = Paths(down="vendor")
# The same of XLA's library. Compiled for an H200 (16384 tokens in shards of 2048, H = 4096, I = 14336, bfloat16) the MLP's
# temporary bytes are 504 MiB so, 472 with up="dual" and 616 with down="vendor", which stores dh in float32; all are far
# within `costs.compiled_peak_bytes`, 1392 MiB.
PALLAS_UNMEASURED = Paths()

# Clean ahead of time (no spill in a loop with tensor-core instructions, shared memory within the limit). sm_80 has no
# tensor memory accelerator and 64 x 128 is its largest dual block without spills.
_DUAL_80 = Blocks(rows=64, columns=128, depth=32, warps=4)
_SINGLE_80 = Blocks(rows=128, columns=128, depth=32, stages=3)
_DUAL = Blocks(rows=128, columns=128, depth=64)
_WIDE = Blocks(rows=128, columns=256, depth=64, stages=3)
_SPLIT = Blocks(rows=128, columns=128, depth=64, halves=2)
# Registers and shared memory for two programs on one multiprocessor: the products of one run under the other's epilogue.
PAIR = Blocks(rows=128, columns=128, depth=64, stages=3, halves=2)
# The wide block reads 125 bytes of shared memory a clock where the square one reads 160 of the 128 that there are.
PERSISTENT = Blocks(rows=128, columns=256, depth=64, stages=3, halves=8, persistent=True)
_SPLIT_80 = Blocks(rows=128, columns=128, depth=32, stages=3, halves=2)
_ROWS = Blocks(rows=1, columns=1024, warps=4, stages=1)
_LOGITS = Blocks(rows=1, columns=4096, warps=8, stages=1)
# 1024 threads of more than 32 registers are a multiprocessor's only program: 132 rows of 257 KB in flight are 34 MB, which
# an H200's L2 cache still holds when the second sweep comes; six programs each are 203 MB, which it does not.
ROW_ALONE = Blocks(rows=1, columns=16384, warps=32, stages=1)

# IEEE float32 has no tensor cores and twice the bytes: no spills, and shared memory of every architecture suffices.
_FLOAT32_PRODUCT = Blocks(rows=64, columns=64, depth=16, stages=2)

_EVERYWHERE = {"glu_elementwise": _ROWS, "cross_entropy": _LOGITS}
_SM_80 = {
    **_EVERYWHERE,
    "glu_up": _DUAL_80,
    "glu_up_aux": _SINGLE_80,
    "dgated": _SPLIT_80,
    "linear": _SINGLE_80,
    "dx": _SINGLE_80,
    "weight_gradient": _SINGLE_80,
}
_SM_90 = {
    **_EVERYWHERE,
    "glu_up": _DUAL,
    "glu_up_aux": _SPLIT,
    "dgated": _SPLIT,
    "linear": _WIDE,
    "dx": _WIDE,
    "weight_gradient": _DUAL,
}

# Two consumer warpgroups of 64 rows each; the third one only issues copies.
_MOSAIC = Blocks(rows=128, columns=128, depth=64, warps=8, stages=4)
_MOSAIC_WIDE = Blocks(rows=128, columns=256, depth=64, warps=8, stages=4)
_MOSAIC_PAIRS = Blocks(rows=128, columns=256, depth=32, warps=8, stages=4)  # two products a step
_MOSAIC_TURNS = Blocks(rows=64, columns=128, depth=64, turns=True)  # each of the two has a block of its own
# Of the dual up-projection alone: so dgated spills 72 bytes (jax 0.11). In turns a block of dgated with 128 registers of
# sums a thread, 64 x 256 or 128 x 128, fits into shared memory only with depth=32, and spills 16 to 5722 bytes.
_MOSAIC_PAIR = Blocks(rows=128, columns=128, depth=64, cluster=2)
_MOSAIC_ADDING = Blocks(rows=128, columns=128, depth=64, warps=8, stages=5)  # two sums in registers

DEFAULTS: Mapping[Kernels, Mapping[str, Mapping[str, Blocks]]] = {
    "triton": {"sm_80": _SM_80, "sm_90": _SM_90, "sm_100": _SM_90},
    "pallas": {
        "sm_90": {
            **_EVERYWHERE,
            "glu_up": _MOSAIC,
            "glu_up_aux": _MOSAIC,
            "dgated": _MOSAIC,
            "linear": _MOSAIC_WIDE,
            "dx": _MOSAIC_PAIRS,
            "weight_gradient": _MOSAIC_ADDING,
        }
    },
}
FLOAT32_DEFAULTS: Mapping[Kernels, Mapping[str, Blocks]] = {
    "triton": dict.fromkeys(_SM_90.keys() - _EVERYWHERE.keys(), _FLOAT32_PRODUCT),
    "pallas": {},
}
ARCHITECTURES = {kernels: tuple(table) for kernels, table in DEFAULTS.items()}


# What `tune` tries: small, fixed, and clean ahead of time on one architecture at least; the first alone takes float32.
TRITON_CANDIDATES: Mapping[str, tuple[Blocks, ...]] = {
    "glu_up": (
        _FLOAT32_PRODUCT,
        _DUAL,
        Blocks(rows=128, columns=128, depth=64, stages=3),
        Blocks(rows=256, columns=64, depth=64),
        _DUAL_80,
    ),
    "glu_up_aux": (
        _FLOAT32_PRODUCT,
        _SPLIT,
        _WIDE,
        Blocks(rows=128, columns=256, depth=64, stages=3, halves=2),
        PAIR,
        _SINGLE_80,
    ),
    "dgated": (
        _FLOAT32_PRODUCT,
        _SPLIT,
        PAIR,
        Blocks(rows=128, columns=128, depth=64, halves=2, persistent=True),
        PERSISTENT,
        _SPLIT_80,
    ),
    "dx": (_FLOAT32_PRODUCT, _WIDE, Blocks(rows=128, columns=256, depth=64, group=16), _DUAL, _SINGLE_80),
    "weight_gradient": (_FLOAT32_PRODUCT, _DUAL, Blocks(rows=128, columns=128, depth=64, group=16), _SINGLE_80),
    "linear": (_FLOAT32_PRODUCT, _WIDE, _DUAL, _SINGLE_80),
    "glu_elementwise": (_ROWS, Blocks(rows=1, columns=2048, warps=8, stages=1)),
    "cross_entropy": (
        _LOGITS,
        Blocks(rows=1, columns=8192, warps=16, stages=1),
        Blocks(rows=1, columns=2048, warps=4),
        ROW_ALONE,
    ),
}

PALLAS_CANDIDATES: Mapping[str, tuple[Blocks, ...]] = {
    "glu_up": (
        _MOSAIC,
        Blocks(rows=128, columns=128, depth=64, stages=3),
        Blocks(rows=128, columns=64, depth=64),
        _MOSAIC_TURNS,
        Blocks(rows=128, columns=64, depth=64, stages=6, turns=True),
        _MOSAIC_PAIR,
    ),
    "glu_up_aux": (_MOSAIC, Blocks(rows=128, columns=128, depth=64, stages=3), Blocks(rows=128, columns=64, depth=64)),
    "dgated": (
        _MOSAIC,
        Blocks(rows=128, columns=128, depth=64, stages=3),
        Blocks(rows=128, columns=64, depth=64),
        _MOSAIC_TURNS,
        Blocks(rows=64, columns=128, depth=64, stages=6, turns=True),
    ),
    "linear": (_MOSAIC_WIDE, Blocks(rows=128, columns=256, depth=64, stages=3), _MOSAIC),
    "dx": (
        _MOSAIC_PAIRS,
        Blocks(rows=128, columns=128, depth=64, stages=3),
        Blocks(rows=128, columns=256, depth=32, stages=3),
    ),
    "weight_gradient": (_MOSAIC_ADDING, Blocks(rows=128, columns=128, depth=128, stages=2), _MOSAIC),
    "glu_elementwise": (_ROWS, Blocks(rows=1, columns=2048, warps=4, stages=1)),
    "cross_entropy": (
        _LOGITS,
        Blocks(rows=1, columns=2048, warps=4, stages=1),
        Blocks(rows=1, columns=8192, warps=4, stages=1, resident=1),
        Blocks(rows=1, columns=4096, warps=4, stages=1, resident=2),
    ),
}
CANDIDATES: Mapping[Kernels, Mapping[str, tuple[Blocks, ...]]] = {
    "triton": TRITON_CANDIDATES,
    "pallas": PALLAS_CANDIDATES,
}
# Of Triton's, those that spill in a loop of products there, by either version of Triton.
SPILLING: Mapping[str, Mapping[str, tuple[Blocks, ...]]] = {
    "sm_80": {
        "glu_up": TRITON_CANDIDATES["glu_up"][1:4],
        "glu_up_aux": TRITON_CANDIDATES["glu_up_aux"][2:4],
        "dgated": (Blocks(rows=128, columns=128, depth=64, halves=2, persistent=True),),
        "dx": (Blocks(rows=128, columns=256, depth=64, group=16),),
        "linear": (_WIDE,),
    },
    "sm_100": {"glu_up_aux": (_WIDE,)},
}


def candidates_on(kernels: Kernels, op: str, architecture: str) -> dict[int, Blocks]:
    """Place among the op's candidates -> candidate, of those that run on an architecture without spills in their loops."""
    left_out = SPILLING.get(architecture, {}).get(op, ())
    return {number: blocks for number, blocks in enumerate(CANDIDATES[kernels][op]) if blocks not in left_out}


def blocks_for(kernels: Kernels, op: str, architecture: str, dtype: str, shape: tuple[int, ...]) -> Blocks:
    """Return the measured configuration of exactly this op, architecture, dtype and shape, else the op's default.

    Args:
        op: a kernel's name. architecture: "sm_90". dtype: of the operands, "bfloat16".
        shape: the sizes that no shard count changes, so that results do not either: (N, K) of a product of t tokens, both
            dims of a weight's gradient, the columns of an elementwise kernel.
    """
    found = _tuned().get((kernels, op, architecture, dtype, shape))
    if isinstance(found, Blocks):
        return found
    default = DEFAULTS[kernels][architecture][op]
    return FLOAT32_DEFAULTS[kernels].get(op, default) if dtype == "float32" else default


def paths_for(kernels: Kernels, architecture: str, dtype: str, shape: tuple[int, int]) -> Paths:
    """Return who makes which product, as measured for exactly this (I, H), else the default."""
    if dtype == "float32":
        return FLOAT32
    found = _tuned().get((kernels, "paths", architecture, dtype, shape))
    default = PALLAS_UNMEASURED if kernels == "pallas" else UNMEASURED
    return found if isinstance(found, Paths) else default


def user_table() -> Path | None:
    """Return where `tune` writes what it measured, whether it is there or not: TILED_TUNED_BLOCKS, else tuned_blocks.json in
    the folder tiled-mlp of XDG_CONFIG_HOME (~/.config). None where the variable is empty.
    """
    if (named := os.environ.get(VARIABLE)) is not None:
        return Path(named).expanduser() if named else None
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "tiled-mlp" / TUNED.name


def tables() -> tuple[Path, ...]:
    """Return the tables that are read: the first of them that has a shape says its blocks."""
    own = user_table()
    return (TUNED,) if own is None or not own.is_file() else (own, TUNED)


def write_tuned(entries: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Put measured entries into a table, a new one where there is none; one that is there for the same key is replaced.

    An entry has kernels, op, architecture, dtype, shape, and `blocks` or (op "paths") `paths`, their fields as they are.
    """
    known: list[Mapping[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    keys = ("kernels", "op", "architecture", "dtype", "shape")
    fresh = [tuple(map(str, (entry[key] for key in keys))) for entry in entries]
    kept = [entry for entry in known if tuple(map(str, (entry[key] for key in keys))) not in fresh]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps([*kept, *entries], indent=1) + "\n")
    os.replace(partial, path)  # who reads it meanwhile reads the one or the other
    _tuned.cache_clear()


@cache
def _tuned() -> dict[tuple[str, str, str, str, tuple[int, ...]], Blocks | Paths]:
    """Return entries of the measured tables; a block's kernel and op, or "paths"."""
    found: dict[tuple[str, str, str, str, tuple[int, ...]], Blocks | Paths] = {}
    for path in reversed(tables()):
        found |= _entries(path)
    return found


def _entries(path: Path) -> dict[tuple[str, str, str, str, tuple[int, ...]], Blocks | Paths]:
    found: dict[tuple[str, str, str, str, tuple[int, ...]], Blocks | Paths] = {}
    try:
        for entry in json.loads(path.read_text()):
            key = (entry["kernels"], entry["op"], entry["architecture"], entry["dtype"], tuple(entry["shape"]))
            found[key] = Paths(**entry["paths"]) if entry["op"] == "paths" else Blocks(**entry["blocks"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{path} with {type(error).__name__}: {error}"
        advice = f"Remove it, or set {VARIABLE} to another one or to nothing."
        raise SpecError(error_text("blocks", "the table of tune", "as tune wrote it", reason, advice=advice)) from error
    return found
