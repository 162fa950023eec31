"""The linear layer's oracle by central differences, its cases, and the seeds of random streams."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_specs.core.rounding import DTYPES
from shared_specs.layers.random import RANDOM_STREAMS, derived_seed, stream_coordinates
from shared_specs.linear.bad_inputs import BAD_LINEAR_CASES
from shared_specs.linear.cases import LINEAR_CASES, LinearCase, linear_baseline, linear_oracle, make_linear_inputs
from shared_specs.linear.oracle import linear

STEP = 1e-6
CENTRAL = 2e-8  # what central differences at STEP resolve; not a limit on any half


@pytest.mark.parametrize("with_bias", [True, False])
def test_gradients_by_central_differences(with_bias: bool) -> None:
    rng = np.random.default_rng(3)
    arrays = {"x": rng.standard_normal((5, 4)), "weight": rng.standard_normal((4, 3)), "bias": rng.standard_normal(3)}
    dy = rng.standard_normal((5, 3))
    if not with_bias:
        del arrays["bias"]

    def run(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return linear(arrays["x"], arrays["weight"], dy, bias=arrays.get("bias"))

    gradients = run(arrays)
    assert set(gradients) == {"y", *(f"d{name}" for name in arrays)}
    for name, array in arrays.items():
        direction = rng.standard_normal(array.shape)
        sides = [(run({**arrays, name: array + sign * STEP * direction})["y"] * dy).sum() for sign in (1, -1)]
        analytic = (gradients[f"d{name}"] * direction).sum()
        assert abs(analytic - (sides[0] - sides[1]) / (2 * STEP)) <= CENTRAL * (1 + abs(analytic))


@pytest.mark.parametrize("case", LINEAR_CASES, ids=lambda case: case.id)
def test_cases(case: LinearCase) -> None:
    """Reproducible arrays in the case's dtype, finite results of the same names, a reason."""
    first, second = make_linear_inputs(case), make_linear_inputs(case)
    for name, array in first.items():
        assert array.dtype == DTYPES[case.dtype]
        assert np.array_equal(array.view(np.uint8), second[name].view(np.uint8))
    truth, rounded = linear_oracle(case), linear_baseline(case)
    assert set(truth) == set(rounded)
    assert all(np.isfinite(value).all() for value in (*truth.values(), *rounded.values()))
    assert not {f"d{name}" for name in case.frozen} & set(truth)
    assert case.reason


def test_ids_are_unique() -> None:
    assert len({case.id for case in LINEAR_CASES}) == len(LINEAR_CASES)
    assert len({case.id for case in BAD_LINEAR_CASES}) == len(BAD_LINEAR_CASES)


coordinates = st.lists(st.integers(0, 10_000), max_size=4).map(tuple)


@given(seed=st.integers(-(2**63), 2**64), first=coordinates, second=coordinates)
def test_seeds_differ_where_their_coordinates_do(seed: int, first: tuple[int, ...], second: tuple[int, ...]) -> None:
    assert 0 <= derived_seed(seed, first) < 2**63
    assert (derived_seed(seed, first) == derived_seed(seed, second)) == (first == second)
    assert derived_seed(seed, first) != derived_seed(seed + 1, first)


def test_seeds_are_the_same_on_every_machine() -> None:
    """A checkpoint's runs resume with these numbers: a change here is a change of every run."""
    assert derived_seed(0, (0, 0)) == 2278555635313361279
    assert derived_seed(0, (1, 0, 0)) == 2794546405068497299


def test_streams_agree_across_the_axes_that_they_do_not_name() -> None:
    """All seeds of a 2 x 3 x 2 mesh: as many different ones as the streams' own axes have places."""
    sizes = {"data": 2, "tensor": 3, "expert": 2}
    mesh = [(d, t, e) for d in range(2) for t in range(3) for e in range(2)]
    found = set()
    for stream, axes in RANDOM_STREAMS.items():
        seeds = {
            derived_seed(7, stream_coordinates(stream, data=data, tensor=tensor, expert=expert))
            for data, tensor, expert in mesh
        }
        assert len(seeds) == np.prod([sizes[axis] for axis in axes])
        assert not seeds & found
        found |= seeds
