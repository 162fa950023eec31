"""The list of combinations holds every pair of options that can meet, and nothing that makes no sense."""

from itertools import product

from tests.matrix import AXES, MATRIX, fits, pairs


def test_every_pair_that_can_meet_does() -> None:
    whole = (dict(zip(AXES, values, strict=True)) for values in product(*AXES.values()))
    possible = set().union(*(pairs(row) for row in whole if fits(row)))
    assert possible == set().union(*(pairs({name: getattr(case, name) for name in AXES}) for case in MATRIX))


def test_every_combination_makes_sense() -> None:
    assert len({case.id for case in MATRIX}) == len(MATRIX)
    for case in MATRIX:
        gate = {"w_gate"} if case.gated else set()
        assert set(case.frozen) < {"x", "w_up", "w_down", *gate, *(f"b_{name}" for name in case.biases)}, case.id
        assert case.gated or not (case.fused or "gate" in case.biases), case.id
        for halves in (("w_gate", "w_up"), ("b_gate", "b_up")):
            assert not case.fused or len(set(halves) & set(case.frozen)) != 1, case.id
        assert not case.fused or ("gate" in case.biases) == ("up" in case.biases), case.id
