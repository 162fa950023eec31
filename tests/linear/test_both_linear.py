"""`TiledLinear` of both halves: every case against the oracle, every bad input."""

from collections import Counter
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from shared_specs.collectives.partitions import bounds
from shared_specs.config import HALVES, NAMES, Half
from shared_specs.linear.bad_inputs import BAD_LINEAR_CASES, GOOD_LINEAR, BadLinearCase
from shared_specs.linear.cases import LINEAR_CASES, LinearCase
from tests.adapters import ADAPTERS
from tests.linear_adapters import RUNNERS, assert_linear_case

executed: Counter[str] = Counter()


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("case", LINEAR_CASES, ids=lambda case: case.id)
def test_case(case: LinearCase, half: Half) -> None:
    results = RUNNERS[half](case)
    executed[half] += 1
    assert_linear_case(case, results)


@pytest.mark.last_of_file
def test_every_collected_case_ran(request: pytest.FixtureRequest) -> None:
    """All skipped is red: as many cases ran, per half, as were collected."""
    collected: Counter[str] = Counter()
    for item in request.session.items:
        if item.originalname == "test_case" and item.path == request.path:
            collected[item.callspec.params["half"]] += 1
    assert executed == collected
    if not request.config.option.keyword:
        assert set(executed) == set(HALVES)


def plain_layer(half: Half, inputs: int, outputs: int, bias: bool) -> Any:
    if half == "torch":
        import torch

        return torch.nn.Linear(inputs, outputs, bias=bias)
    from flax import nnx

    return nnx.Linear(inputs, outputs, use_bias=bias, rngs=nnx.Rngs(0))


def ones(half: Half, *shape: int) -> Any:
    return ADAPTERS[half].from_numpy(np.ones(shape, np.float32))


def bad_call(half: Half, case: BadLinearCase) -> None:
    layer_class = import_module(NAMES[half].package).TiledLinear
    if case.converted is not None:
        layer_class.from_linear(case.converted)
        return
    arguments = {**GOOD_LINEAR, **case.arguments}
    if half == "jax":
        from flax import nnx

        arguments["rngs"] = nnx.Rngs(0)
    copied = None if case.copied is None else plain_layer(half, *case.copied)
    if case.how == "init" and copied is not None:
        arguments["init_linear"] = copied
    layer = layer_class(arguments.pop("in_features"), arguments.pop("out_features"), **arguments)
    if copied is not None:
        layer.copy_params_from(copied)
    elif isinstance(case.x, tuple):
        parts = isinstance(case.x[0], tuple)
        layer([ones(half, *shape) for shape in case.x] if parts else ones(half, *case.x))
    else:
        layer(case.x)


@pytest.mark.parametrize(
    ("case", "half"),
    [(case, half) for case in BAD_LINEAR_CASES for half in case.halves],
    ids=lambda value: getattr(value, "id", value),
)
def test_bad_input(case: BadLinearCase, half: Half) -> None:
    with pytest.raises(case.error) as caught:
        bad_call(half, case)
    assert type(caught.value) is case.error
    assert str(caught.value) == case.text(NAMES[half])


@pytest.mark.parametrize("half", HALVES)
def test_the_good_calls_pass(half: Half) -> None:
    """What the bad inputs are changes of."""
    bad_call(half, BadLinearCase(id="", message="", x=(2, 3, 8)))
    bad_call(half, BadLinearCase(id="", message="", copied=(8, 12, True)))
    bad_call(half, BadLinearCase(id="", message="", copied=(8, 12, True), how="init"))
    split = tuple((2, 3, stop - start) for start, stop in pairwise(bounds(8, 2)))
    bad_call(half, BadLinearCase(id="", message="", arguments={"input_is_already_split": True}, x=split))
