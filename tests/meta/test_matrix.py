"""The list of combinations holds every pair of options that can meet, and nothing that makes no sense."""

from itertools import combinations, product

from tests.matrix import AXES, MATRIX, fits


def test_every_pair_that_can_meet_does() -> None:
    number = {(name, value): n for n, (name, value) in enumerate((a, v) for a in AXES for v in AXES[a])}
    possible: set[tuple[int, int]] = set()
    for values in product(*AXES.values()):
        if fits(row := dict(zip(AXES, values, strict=True))):
            possible.update(combinations([number[option] for option in row.items()], 2))
    rows = [{name: getattr(case, name) for name in AXES} for case in MATRIX]
    assert possible == {pair for row in rows for pair in combinations([number[option] for option in row.items()], 2)}


def test_every_combination_makes_sense() -> None:
    assert len({case.id for case in MATRIX}) == len(MATRIX)
    for case in MATRIX:
        gate = {"w_gate"} if case.gated else set()
        assert set(case.frozen) < {"x", "w_up", "w_down", *gate, *(f"b_{name}" for name in case.biases)}, case.id
        assert case.gated or not (case.fused or "gate" in case.biases), case.id
        for halves in (("w_gate", "w_up"), ("b_gate", "b_up")):
            assert not case.fused or len(set(halves) & set(case.frozen)) != 1, case.id
        assert not case.fused or ("gate" in case.biases) == ("up" in case.biases), case.id
