"""Every case of the mixture of experts in every half against the float64 oracle, the halves against each other, bad inputs."""

from importlib import import_module
from typing import Any

import numpy as np
import pytest

from shared_specs.config import NAMES, Half
from shared_specs.core.bad_case import BadCase
from shared_specs.core.rounding import DTYPES
from shared_specs.moe.bad_inputs import BAD_MOE_CASES, GOOD_MOE_SHAPES
from shared_specs.moe.cases import MOE_CASES, MoECase, make_moe_inputs
from shared_specs.moe.oracle import moe
from shared_specs.reference import oracle
from tests.adapters import ADAPTERS
from tests.asserting import assert_case
from tests.core.test_both_bad_inputs import placed
from tests.core.test_both_cross import Arrays, Tensors, assert_agree
from tests.core.test_oracle import CENTRAL, STEP

BAD_PAIRS = [(case, half) for case in BAD_MOE_CASES for half in case.halves]
# One call in each dtype, and those of no tokens and of an expert that has all.
CROSSING = [case for case in MOE_CASES if case.logits]


@pytest.mark.parametrize("half", ["torch", "jax"])
@pytest.mark.parametrize("case", MOE_CASES, ids=lambda case: case.id)
def test_case(case: MoECase, half: str) -> None:
    assert_case(case, ADAPTERS[half].run_moe(case))


@pytest.mark.parametrize("case", CROSSING, ids=lambda case: case.id)
def test_the_halves_agree(case: MoECase) -> None:
    assert_agree(case, Tensors().run_moe(case), Arrays().run_moe(case))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_of_the_oracle_by_central_differences(scoring: str, normalize: bool) -> None:
    rng = np.random.default_rng(3)
    shapes = {"x": (5, 4), "w_router": (4, 3), "w_gate": (3, 4, 6), "w_up": (3, 4, 6), "w_down": (3, 6, 4)}
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    dy, dlogits = rng.standard_normal((5, 4)), rng.standard_normal((5, 3))

    def run(arrays: dict[str, Any]) -> dict[str, Any]:
        return moe(*arrays.values(), dy, dlogits, top_k=2, scoring=scoring, normalize_top_k=normalize)

    gradients = run(arrays)
    for name, array in arrays.items():
        direction = rng.standard_normal(array.shape)
        moved = [run({**arrays, name: array + sign * STEP * direction}) for sign in (1, -1)]
        sides = [(found["y"] * dy).sum() + (found["logits"] * dlogits).sum() for found in moved]
        analytic = (gradients[f"d{name}"] * direction).sum()
        assert abs(analytic - (sides[0] - sides[1]) / (2 * STEP)) <= CENTRAL * (1 + abs(analytic))


def test_experts_of_every_case_are_chosen_clearly() -> None:
    """Or a rounding would choose another one, and the halves would rightly differ."""
    assert len({case.id for case in MOE_CASES}) == len(MOE_CASES)
    for case in MOE_CASES:
        arrays = {name: a.astype(np.float64) for name, a in make_moe_inputs(case).items()}
        logits = np.sort(arrays["x"].reshape(-1, case.hidden) @ arrays["w_router"])[:, ::-1]
        if 0 < case.top_k < case.experts and logits.size:
            assert (logits[:, case.top_k - 1] - logits[:, case.top_k]).min() > 1 / 2**10, case.id


def test_an_expert_without_tokens_has_gradients_of_zero() -> None:
    (case,) = (case for case in MOE_CASES if case.routing == "empty")
    for half in ("torch", "jax"):
        found = ADAPTERS[half].run_moe(case)
        for name in ("dw_gate", "dw_up", "dw_down"):
            assert [bool(gradient.any()) for gradient in found[name]] == [True] * 4 + [False]
    assert oracle(case)["dw_router"][:, -1].any()  # which makes its logits what they are


def given(half: Half, case: BadCase) -> list[Any]:
    """The operands of the changed call, in the half's layout."""
    found = []
    for name, good in GOOD_MOE_SHAPES.items():
        array = np.ones(case.shapes.get(name, good))
        array = array.astype(DTYPES.get(case.dtypes.get(name, "float32"), np.dtype("int32")))
        if name[0] == "w" and array.ndim > 1 and (half == "torch") != (name in case.transposed):
            array = array.swapaxes(-1, -2)
        operand = placed(half, case, name, ADAPTERS[half].from_numpy(array.copy()))
        found.append(case.operands.get(name, operand))
    return found


@pytest.mark.parametrize(("case", "half"), BAD_PAIRS, ids=lambda value: getattr(value, "id", value))
def test_bad_input(case: BadCase, half: Half) -> None:
    package = import_module(NAMES[half].package)
    with pytest.raises(case.error) as caught:
        package.tiled_moe(*given(half, case), **{"top_k": 2} | case.arguments)
    assert type(caught.value) is case.error
    assert str(caught.value) == case.text(NAMES[half])


@pytest.mark.parametrize("half", ["torch", "jax"])
def test_a_module_is_checked_when_it_is_made(half: Half) -> None:
    package = import_module(NAMES[half].package)
    rngs: dict[str, Any] = {}
    if half == "jax":
        from flax import nnx

        rngs = {"rngs": nnx.Rngs(0)}
    wrong = {
        "TiledMoE: top_k must be in [1, 4], the number of experts, got 5.": {"top_k": 5},
        "TiledMoE: num_experts must be >= 1, got 0.": {"num_experts": 0},
        "TiledMoE: scoring must be one of softmax, sigmoid, got None.": {"scoring": None},
    }
    for message, arguments in wrong.items():
        with pytest.raises(package.SpecError) as caught:
            package.TiledMoE(
                **{"hidden_size": 8, "intermediate_size": 12, "num_experts": 4, "top_k": 2} | arguments, **rngs
            )
        assert str(caught.value) == message
    weights = given(half, BadCase(id="", message="", transposed=("w_down",)))[1:]
    with pytest.raises(package.SpecError, match=r"^TiledMoE\.from_weights: w_down must be .* This one is transposed"):
        package.TiledMoE.from_weights(*weights, top_k=2)
