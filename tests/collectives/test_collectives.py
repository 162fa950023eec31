"""The specification of the collectives against its own definition: each backward is the adjoint of its forward."""

import numpy as np
import pytest

from shared_specs.collectives.cases import collective_cases
from shared_specs.collectives.oracle import COLLECTIVES
from shared_specs.tolerances import DISTRIBUTED_FLOAT64

# Where x (or y, and then dy) is one array that all ranks hold, it counts once.
X_ONCE = {
    "copy_to_tensor_parallel_region",
    "scatter_to_tensor_parallel_region",
    "scatter_to_sequence_parallel_region",
}
Y_ONCE = {"reduce_from_tensor_parallel_region", "gather_from_tensor_parallel_region"}
CASES = [case for ranks in (1, 2, 3, 4) for case in collective_cases(ranks)]


def product(a, b):
    return sum(float((one * other).sum()) for one, other in zip(a, b, strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.ranks}-{case.id}")
def test_backward_is_the_adjoint_of_forward(case):
    once = case.arguments.get("tensor_parallel_output_grad") is False
    x, dy = case.inputs(), case.output_gradients()
    if case.name in X_ONCE:
        x = x[:1] * case.ranks
    if case.name in Y_ONCE or once:
        dy = dy[:1] * case.ranks
    y, dx = case.outputs(x), case.input_gradients(dy)
    assert [part.shape for part in dx] == [part.shape for part in x]
    outer = product(dy, y) / (case.ranks if case.name in Y_ONCE or once else 1)
    inner = product(dx, x) / (case.ranks if case.name in X_ONCE else 1)
    size = np.sqrt(product(x, x) * product(dx, dx)) + 1
    assert abs(outer - inner) <= DISTRIBUTED_FLOAT64 * size


def test_every_collective_has_cases_and_some_are_uneven():
    for ranks in (2, 4):
        cases = collective_cases(ranks)
        assert {case.name for case in cases} == set(COLLECTIVES)
        assert len({case.id for case in cases}) == len(cases)
        assert {case.even for case in cases} == {True, False}
