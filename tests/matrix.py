"""Combinations of the MLP's options, chosen so that every two values of two options that can meet do meet in some case."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

from shared_specs.config import ACTIVATIONS
from shared_specs.mlp.cases import MLPCase

Row = dict[str, Any]
Pair = frozenset[tuple[str, Any]]

AXES: dict[str, tuple[Any, ...]] = {
    "gated": (True, False),
    "fused": (False, True),
    "frozen": (
        (),
        ("x",),
        ("w_down",),
        ("w_up", "w_down"),
        ("w_gate", "w_up"),
        ("x", "w_gate"),
        ("x", "b_down"),
        ("w_gate", "w_up", "w_down", "b_up"),
        ("x", "w_gate", "w_up", "w_down"),
    ),
    "biases": (
        (),
        ("gate",),
        ("up",),
        ("down",),
        ("gate", "up"),
        ("gate", "down"),
        ("up", "down"),
        ("gate", "up", "down"),
    ),
    "activation": tuple(ACTIVATIONS),
    "dims": ((1,), (9,), (3, 11), (32,)),
    "num_shards": (1, 4, 8, 64),
    "keep": (0.0, 0.5, 1.0),
}


def fits(row: Row) -> bool:
    """Whether options, some or all of them, make sense together: whatever is named exists, and something needs a gradient."""
    biases, frozen = row.get("biases"), row.get("frozen", ())
    halves = [{f"{kind}_gate", f"{kind}_up"}.intersection(frozen) for kind in "wb"]
    if row.get("fused") and (row.get("gated") is False or any(len(names) == 1 for names in halves)):
        return False
    if row.get("fused") and biases is not None and ("gate" in biases) != ("up" in biases):
        return False
    if row.get("gated") is False and ("w_gate" in frozen or "gate" in (biases or ())):
        return False
    if biases is None:
        return True
    named = {name[2:] for name in frozen if name.startswith("b_")}
    return named <= set(biases) and (bool(biases) or not {"x", "w_up", "w_down"} <= set(frozen))


def pairs(row: Row) -> set[Pair]:
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def pairwise(axes: Mapping[str, Sequence[Any]], fits: Callable[[Row], bool]) -> list[Row]:
    """Rows with a value of every axis, few of them, that hold every pair of values of two axes that fits."""
    of_axes = [[(name, value) for value in values] for name, values in axes.items()]
    missing = dict.fromkeys(
        frozenset(pair) for two in combinations(of_axes, 2) for pair in product(*two) if fits(dict(pair))
    )
    rows: list[Row] = []
    while missing:
        row = dict(next(iter(missing)))
        for name in sorted(axes.keys() - row.keys(), key=list(axes).index):
            possible = [{**row, name: value} for value in axes[name] if fits({**row, name: value})]
            row = max(possible, key=lambda row: len(pairs(row) & missing.keys()))
        for pair in pairs(row):
            missing.pop(pair, None)
        rows.append(row)
    return rows


MATRIX = tuple(
    MLPCase(
        **row, hidden=6, intermediate=10, dtype="float64", seed=seed, reason="every two values of two options that fit"
    )
    for seed, row in enumerate(pairwise(AXES, fits))
)
