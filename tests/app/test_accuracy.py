"""`bench --op accuracy`: the rows of its record, and that what computes something else is noticed."""

import math
from dataclasses import replace

import numpy as np
import pytest

from shared_specs.app.bench.accuracy import WEIGHTS, case_of, inputs_of, measure_errors
from shared_specs.app.bench.workloads import ACCURACY_WORKLOADS
from shared_specs.core.rounding import DTYPES, relative_error, round_to
from shared_specs.mlp.oracle import mlp
from shared_specs.reference import baseline, oracle
from shared_specs.shards import plan_tokens

SMALL = replace(ACCURACY_WORKLOADS[0], name="small", tokens=2048, hidden=16, intermediate=24)


def plain():
    return baseline(case_of(SMALL))


def drifting():
    """What sums its shards in bfloat16."""
    total, rounding = plain(), round_to(SMALL.dtype)
    x, dy, *weights = (inputs_of(SMALL)[name].astype(np.float32) for name in ("x", "dy", "w_gate", "w_up", "w_down"))
    total |= {name: np.zeros_like(total[name]) for name in WEIGHTS}
    for start, stop in plan_tokens(SMALL.tokens, num_shards=SMALL.shards):
        found = mlp(x[start:stop], *weights, dy[start:stop], rounding=rounding)
        total |= {name: rounding(total[name] + found[name]) for name in WEIGHTS}
    return total


def test_the_errors_of_every_variant():
    rows = measure_errors(SMALL, {"plain": plain, "drifting": drifting}, {}, {})
    assert [row["variant"] for row in rows] == ["plain", "drifting"]
    assert {(row["workload"], row["shards"]) for row in rows} == {("small", 256)}
    truth = oracle(case_of(SMALL))
    for row, found in zip(rows, (plain(), drifting()), strict=True):
        assert row["errors"] == {name: relative_error(found[name], truth[name]) for name in truth}
        assert row["worst_weight_error"] == max(row["errors"][name] for name in WEIGHTS)
    reference, drifted = (row["errors"] for row in rows)
    assert rows[0]["ratio_to_plain"] == 1
    assert rows[1]["ratio_to_plain"] == max(drifted[name] / reference[name] for name in WEIGHTS)
    assert 3 < rows[1]["ratio_to_plain"] < math.inf


def test_a_ratio_is_that_of_the_worst_weight():
    def worse():
        found = plain()
        return found | {"dw_up": found["dw_up"] * 1.1}

    row = measure_errors(SMALL, {"plain": plain, "worse": worse}, {}, {})[1]
    reference = measure_errors(SMALL, {"plain": plain}, {}, {})[0]["errors"]
    assert row["worst_weight_error"] == row["errors"]["dw_up"]
    assert row["ratio_to_plain"] == row["errors"]["dw_up"] / reference["dw_up"] > 10


@pytest.mark.parametrize("quantity", ["y", "dx", *WEIGHTS])
def test_a_plain_variant_that_is_wrong_stops_the_benchmark(quantity):
    def wrong():
        found = plain()
        return found | {quantity: found[quantity] * 1.05}

    with pytest.raises(RuntimeError, match=rf"^bench: plain does not compute {quantity}$"):
        measure_errors(SMALL, {"plain": wrong}, {}, {})


@pytest.mark.parametrize(
    ("quantity", "factor"), [("y", 1.05), ("dx", 1.05), ("dw_gate", 0.0), ("dw_up", -1.0), ("dw_down", math.nan)]
)
@pytest.mark.parametrize("peer", [False, True])
def test_another_variant_that_is_wrong_stops_the_benchmark(quantity, factor, peer):
    """y and dx within the limits of the dtype, and of the weight gradients what cannot be drift."""

    def wrong():
        found = plain()
        return found | {quantity: found[quantity] * factor}

    own, peers = {"plain": plain}, {}
    (peers if peer else own)["wrong"] = wrong
    with pytest.raises(RuntimeError, match=rf"^bench: wrong does not compute {quantity}$"):
        measure_errors(SMALL, own, peers, {})


def test_a_peer_that_does_not_run_is_a_row_with_the_reason(capsys):
    def broken():
        raise OSError("no such device")

    peers = {"broken": broken, "partial": lambda: {"y": plain()["y"]}}
    rows = measure_errors(SMALL, {"plain": plain}, peers, {"absent": "No module named absent."})
    shared = {"workload": "small", "shards": 256}
    assert rows[1:] == [
        {"variant": "absent", **shared, "left_out": "No module named absent."},
        {"variant": "broken", **shared, "left_out": "OSError: no such device"},
        {"variant": "partial", **shared, "left_out": "KeyError: 'dx'"},
    ]
    assert "broken: left out: OSError: no such device" in capsys.readouterr().err
    with pytest.raises(OSError, match="no such device"):
        measure_errors(SMALL, {"plain": plain, "tiled": broken}, {}, {})


def test_the_operands_are_of_the_dtype():
    given = inputs_of(SMALL)
    assert {array.dtype for array in given.values()} == {DTYPES["bfloat16"]}
    assert {name: array.shape for name, array in given.items()} == {
        "x": (2048, 16), "dy": (2048, 16), "w_gate": (16, 24), "w_up": (16, 24), "w_down": (24, 16),
    }  # fmt: skip
