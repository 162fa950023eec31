"""Every loss case, in every half and backend, against the float64 oracle."""

from collections import Counter

import pytest

from shared_specs.loss.cases import LOSS_CASES, LossCase
from tests.adapters import ADAPTERS
from tests.asserting import assert_case

RUNS = [(half, backend) for half in ("torch", "jax") for backend in ADAPTERS[half].backends]
executed: Counter[tuple[str, str]] = Counter()


@pytest.mark.parametrize(("half", "backend"), RUNS)
@pytest.mark.parametrize("case", LOSS_CASES, ids=lambda case: case.id)
def test_case(case: LossCase, half: str, backend: str) -> None:
    results = ADAPTERS[half].run_loss(case, backend)
    executed[half, backend] += 1
    assert_case(case, results)


@pytest.mark.last_of_file
def test_every_collected_case_ran(request: pytest.FixtureRequest) -> None:
    """All skipped is red: as many cases ran, per half and backend, as were collected."""
    collected: Counter[tuple[str, str]] = Counter()
    for item in request.session.items:
        if item.originalname == "test_case" and item.path == request.path:
            collected[item.callspec.params["half"], item.callspec.params["backend"]] += 1
    assert executed == collected
    if not request.config.option.keyword:
        assert set(executed) == set(RUNS)
