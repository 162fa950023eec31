"""`check` of the PyTorch half: every published fault is found and named, and a right training is equal."""

import pytest

from tests.check.torch_faults import FAULTS
from tiled_torch import check


@pytest.mark.parametrize("name", FAULTS)
def test_a_published_fault_is_found_and_named(name):
    fault = FAULTS[name]
    report = check(**fault.make())
    first = report.first
    assert first is not None
    assert (first.step, first.kind, first.name) == (1, fault.kind, fault.name), str(report)
    assert fault.says in str(first)
    assert not report.equal
    assert str(report).endswith(f"differs first at {first}")


@pytest.mark.deep_but(8)
@pytest.mark.parametrize("name", FAULTS)
def test_the_same_without_its_fault_is_right(name):
    given = FAULTS[name].make()
    report = check(
        **given | {"tile": given.get("plain", lambda model: model), "step": given.get("plain_step", given.get("step"))}
    )
    assert report.equal, str(report)
