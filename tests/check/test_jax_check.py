"""`check` of the JAX half: every published fault is found and named, and a right training is equal."""

import pytest

from tests.check.jax_faults import FAULTS
from tiled_jax import check

QUICK = ("tied_weight_with_half_its_gradient", "state_updated_once_a_shard")


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("name", dict.fromkeys((*QUICK, *FAULTS)))
def test_a_published_fault_is_found_and_named(name):
    fault = FAULTS[name]
    report = check(**fault.make())
    first = report.first
    assert first is not None
    assert (first.step, first.kind, first.name) == (1, fault.kind, fault.name), str(report)
    assert fault.says in str(first)
    assert not report.equal
    assert str(report).endswith(f"differs first at {first}")
