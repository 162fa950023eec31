"""Every bad input raises the one message of shared_specs/bad_inputs.py, in both halves, before any work."""

from importlib import import_module
from typing import Any

import numpy as np
import pytest

from shared_specs.bad_inputs import (
    BAD_CASES,
    DEVICES,
    GOOD_SHAPES,
    UNUSABLE_BACKEND,
    BadCase,
)
from shared_specs.bad_loss_inputs import BAD_LOSS_CASES, GOOD_LOSS_SHAPES
from shared_specs.config import NAMES, Half, LossOptions
from shared_specs.errors import SpecError, UnsupportedError
from shared_specs.rounding import DTYPES
from tests.adapters import ADAPTERS

PAIRS = [(case, half) for case in BAD_CASES for half in case.halves]
LOSS_PAIRS = [(case, half) for case in BAD_LOSS_CASES for half in case.halves]


def operands(half: Half, case: BadCase) -> tuple[list[Any], dict[str, Any]]:
    """The operands x, w_gate, w_up, w_down of the changed call, in the half's layout, and its biases."""
    arrays = {}
    for name, shape in {**GOOD_SHAPES, **case.shapes}.items():
        flip = name.startswith("w") and (half == "torch") != (name in case.transposed)
        dtype = (
            np.dtype(case.dtypes[name])
            if case.dtypes.get(name) == "int32"
            else DTYPES[case.dtypes.get(name, "float32")]
        )
        array = ADAPTERS[half].from_numpy(np.ones(shape[::-1] if flip else shape).astype(dtype))
        arrays[name] = placed(half, case, name, array)
    biases = {name[2:]: array for name, array in arrays.items() if name.startswith("b_")}
    return [case.operands.get(name, arrays[name]) for name in GOOD_SHAPES], biases


def placed(half: Half, case: BadCase, name: str, array: Any) -> Any:
    """An operand where the case wants it; where it wants nothing, where it is."""
    if not case.elsewhere:
        return array
    if half == "torch":
        return array.to(DEVICES[NAMES[half].package][name in case.elsewhere])
    import jax

    return jax.device_put(array, jax.devices("cpu")[name in case.elsewhere])


def tiled_mlp(half: Half) -> Any:
    if half == "torch":
        from tiled_torch import tiled_mlp
    else:
        from tiled_jax import tiled_mlp
    return tiled_mlp


@pytest.mark.parametrize(("case", "half"), PAIRS, ids=lambda value: getattr(value, "id", value))
def test_bad_input(case: BadCase, half: Half) -> None:
    arrays, biases = operands(half, case)
    with pytest.raises(case.error) as caught:
        tiled_mlp(half)(*arrays, **({"biases": biases} if biases else {}), **case.arguments)
    assert type(caught.value) is case.error
    assert str(caught.value) == case.text(NAMES[half])


@pytest.mark.parametrize(("case", "half"), LOSS_PAIRS, ids=lambda value: getattr(value, "id", value))
def test_bad_loss_input(case: BadCase, half: Half) -> None:
    function = import_module(NAMES[half].package).tiled_linear_cross_entropy
    arrays = {}
    for name, shape in {**GOOD_LOSS_SHAPES, **case.shapes}.items():
        dtype = np.dtype("int64" if half == "torch" else "int32") if name == "targets" else DTYPES["float32"]
        if name in case.dtypes:
            dtype = DTYPES.get(case.dtypes[name], np.dtype("int32"))
        flip = name == "weight" and (half == "torch") != (name in case.transposed)
        values = np.full(shape[::-1] if flip else shape, case.target if name == "targets" else 1)
        arrays[name] = placed(half, case, name, ADAPTERS[half].from_numpy(values.astype(dtype)))
    arguments = dict(case.arguments)
    if case.class_weight is not None:
        weights = ADAPTERS[half].from_numpy(np.ones(case.class_weight, np.float32))
        arguments["loss"] = LossOptions(class_weight=placed(half, case, "class_weight", weights))
    operands = [case.operands.get(name, arrays[name]) for name in GOOD_LOSS_SHAPES]
    with pytest.raises(case.error) as caught:
        function(*operands, **({"bias": arrays["bias"]} if "bias" in arrays else {}), **arguments)
    assert type(caught.value) is case.error
    assert str(caught.value) == case.text(NAMES[half])


MODULES = [
    ("TiledMLP", {"gated": None}, "gated must be True or False, got NoneType."),
    ("TiledMLP", {"bias": "no"}, "bias must be True or False, got str."),
    ("TiledMLP", {"fused_gate_up": 1}, "fused_gate_up must be True or False, got int."),
    ("TiledMLP", {"intermediate_size": "4"}, "intermediate_size must be an integer, got str."),
    ("TiledLinearCrossEntropy", {"bias": "no"}, "bias must be True or False, got str."),
    ("TiledLinearCrossEntropy", {"vocab_size": None}, "vocab_size must be an integer, got None."),
]


def rngs(half: Half) -> dict[str, Any]:
    if half == "torch":
        return {}
    from flax import nnx

    return {"rngs": nnx.Rngs(0)}


@pytest.mark.parametrize("half", ["torch", "jax"])
@pytest.mark.parametrize(("name", "arguments", "rule"), MODULES)
def test_bad_module(name: str, arguments: dict[str, Any], rule: str, half: Half) -> None:
    sizes = ("intermediate_size",) if name == "TiledMLP" else ("vocab_size",)
    good = dict.fromkeys(("hidden_size", *sizes), 8)
    with pytest.raises(TypeError) as caught:
        getattr(import_module(NAMES[half].package), name)(**{**good, **arguments}, **rngs(half))
    assert str(caught.value) == f"{name}: {rule}"


@pytest.mark.parametrize("half", ["torch", "jax"])
def test_a_module_is_not_given_integers(half: Half) -> None:
    module = import_module(NAMES[half].package).TiledMLP(8, 8, **rngs(half))
    with pytest.raises(
        SpecError, match=r"^tiled_mlp: x must be of dtype float32, bfloat16, float16, float64, got int32."
    ):
        module(ADAPTERS[half].from_numpy(np.ones((2, 8), np.int32)))
    with pytest.raises(TypeError, match=r"^tiled_mlp: x must be an array, got list\."):
        module([1.0])


@pytest.mark.parametrize(("half", "backend"), [("torch", "triton"), ("jax", "pallas")])
def test_unusable_backend_says_why(half: Half, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    reason = import_module(NAMES[half].package).usable_backends()[backend]
    if reason is None:
        pytest.skip(f"{backend} is usable here")
    arrays, _ = operands(half, BadCase(id="", message=""))
    with pytest.raises(UnsupportedError) as caught:
        tiled_mlp(half)(*arrays, backend=backend)
    assert str(caught.value) == UNUSABLE_BACKEND.format(backend=backend, reason=reason)
