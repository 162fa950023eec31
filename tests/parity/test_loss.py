"""Every loss case, in every half and backend, against the float64 oracle; then the two halves against each other."""

from collections import Counter

import numpy as np
import pytest

from shared_specs.cases import LOSS_CASES, LossCase
from tests.adapters import ADAPTERS
from tests.asserting import assert_case, assert_within, truth

RUNS = [(half, backend) for half in ("torch", "jax") for backend in ADAPTERS[half].backends]
executed: Counter[tuple[str, str]] = Counter()


@pytest.mark.parametrize(("half", "backend"), RUNS)
@pytest.mark.parametrize("case", LOSS_CASES, ids=lambda case: case.id)
def test_case(case: LossCase, half: str, backend: str) -> None:
    results = ADAPTERS[half].run_loss(case, backend)
    executed[half, backend] += 1
    assert_case(case, results)


@pytest.mark.parametrize("case", LOSS_CASES, ids=lambda case: case.id)
def test_the_halves_agree(case: LossCase) -> None:
    oracle, limits = truth(case)
    torch, jax = (ADAPTERS[half].run_loss(case) for half in ("torch", "jax"))
    assert set(torch) == set(jax) == set(oracle)
    for name, expected in oracle.items():
        difference = torch[name].astype(np.float64) - jax[name].astype(np.float64)
        assert_within(expected + difference, expected, 2 * limits[name], f"{case.id} {name}: torch against JAX")


def test_every_collected_case_ran(request: pytest.FixtureRequest) -> None:
    """All skipped is red: as many cases ran, per half and backend, as were collected."""
    collected: Counter[tuple[str, str]] = Counter()
    for item in request.session.items:
        if item.originalname == "test_case" and item.path == request.path:
            collected[item.callspec.params["half"], item.callspec.params["backend"]] += 1
    assert executed == collected
    if not request.config.option.keyword:
        assert set(executed) == set(RUNS)
