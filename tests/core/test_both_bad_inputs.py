"""Every bad input raises the one message of shared_specs/bad_inputs.py, in both halves, before any work."""

from importlib import import_module
from typing import Any

import numpy as np
import pytest

from shared_specs.config import NAMES, Half, LossOptions
from shared_specs.core.bad_case import DEVICES, BadCase
from shared_specs.core.rounding import DTYPES
from shared_specs.errors import SpecError, UnsupportedError
from shared_specs.loss.bad_inputs import BAD_HEAD_CASES, BAD_LOSS_CASES, GOOD_LOSS_SHAPES
from shared_specs.mlp.bad_inputs import BAD_CASES, BAD_WEIGHTS_CASES, GOOD_SHAPES, UNUSABLE_BACKEND
from tests.adapters import ADAPTERS

PAIRS = [(case, half) for case in BAD_CASES for half in case.halves]
LOSS_PAIRS = [(case, half) for case in BAD_LOSS_CASES for half in case.halves]
WEIGHTS_PAIRS = [(case, half) for case in BAD_WEIGHTS_CASES for half in case.halves]
HEAD_PAIRS = [(case, half) for case in BAD_HEAD_CASES for half in case.halves]


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


@pytest.mark.parametrize(("case", "half"), WEIGHTS_PAIRS, ids=lambda value: getattr(value, "id", value))
def test_bad_weights_of_a_module(case: BadCase, half: Half) -> None:
    (_, *weights), biases = operands(half, case)
    with pytest.raises(case.error) as caught:
        import_module(NAMES[half].package).TiledMLP.from_weights(
            *weights, **({"biases": biases} if biases else {}), **case.arguments
        )
    assert type(caught.value) is case.error
    assert str(caught.value) == case.text(NAMES[half])


@pytest.mark.parametrize(("case", "half"), HEAD_PAIRS, ids=lambda value: getattr(value, "id", value))
def test_bad_weights_of_a_head(case: BadCase, half: Half) -> None:
    arrays = loss_arrays(half, case)
    bias = {"bias": arrays["bias"]} if "bias" in arrays else {}
    with pytest.raises(case.error) as caught:
        import_module(NAMES[half].package).TiledLinearCrossEntropy.from_weights(
            case.operands.get("weight", arrays["weight"]), **bias, **case.arguments
        )
    assert type(caught.value) is case.error
    assert str(caught.value) == case.text(NAMES[half])


def loss_arrays(half: Half, case: BadCase) -> dict[str, Any]:
    """The operands of the changed call of the loss, in the half's layout."""
    arrays = {}
    for name, shape in {**GOOD_LOSS_SHAPES, **case.shapes}.items():
        dtype = np.dtype("int64" if half == "torch" else "int32") if name == "targets" else DTYPES["float32"]
        if name in case.dtypes:
            dtype = DTYPES.get(case.dtypes[name], np.dtype("int32"))
        flip = name == "weight" and (half == "torch") != (name in case.transposed)
        values = np.full(shape[::-1] if flip else shape, case.target if name == "targets" else 1)
        arrays[name] = placed(half, case, name, ADAPTERS[half].from_numpy(values.astype(dtype)))
    return arrays


@pytest.mark.parametrize(("case", "half"), LOSS_PAIRS, ids=lambda value: getattr(value, "id", value))
def test_bad_loss_input(case: BadCase, half: Half) -> None:
    function = import_module(NAMES[half].package).tiled_linear_cross_entropy
    arrays = loss_arrays(half, case)
    arguments = dict(case.arguments)
    if case.class_weight is not None:
        weights = ADAPTERS[half].from_numpy(np.ones(case.class_weight, np.float32))
        arguments["loss"] = LossOptions(class_weight=placed(half, case, "class_weight", weights))
    operands = [case.operands.get(name, arrays[name]) for name in GOOD_LOSS_SHAPES]
    with pytest.raises(case.error) as caught:
        function(*operands, **{name: a for name, a in arrays.items() if name not in GOOD_LOSS_SHAPES}, **arguments)
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


@pytest.mark.parametrize("half", ["torch", "jax"])
@pytest.mark.parametrize("name", ["TiledMLP", "TiledLinearCrossEntropy"])
@pytest.mark.parametrize(("dtype", "got"), [("int32", "int32"), ("complex64", "complex64"), ("f16?", "'f16?'")])
def test_dtype_that_no_parameter_has(name: str, dtype: str, got: str, half: Half) -> None:
    """jax.numpy has two such arguments, and takes names."""
    arguments = {"torch": ("dtype",), "jax": ("dtype", "param_dtype")}[half]
    value = getattr(import_module("torch" if half == "torch" else "jax.numpy"), dtype, dtype)
    for argument in arguments:
        with pytest.raises(SpecError) as caught:
            getattr(import_module(NAMES[half].package), name)(8, 8, **{argument: value}, **rngs(half))
        assert str(caught.value) == f"{name}: {argument} must be one of float32, bfloat16, float16, float64, got {got}."


ROWS = "[t, ...], or [1, t, ...] where x has three or more dims, for a shard of t tokens"
WITHOUT_ROWS = {
    "a sum": (lambda x: x.sum(), (5, 8), "[]"),
    "a row more": (
        lambda x: x.repeat(2, 1) if hasattr(x, "repeat_interleave") else x.repeat(2, 0),
        (5, 8),
        "[4, 8]",
    ),
    "features first": (lambda x: x.T, (5, 8), "[8, t]"),
    "one row": (lambda x: x[:, :1], (2, 3, 8), "[1, 1, 8]"),
    "some rows": (lambda x: x[:2, 0], (5, 8), "[2]"),
}


@pytest.mark.parametrize("half", ["torch", "jax"])
@pytest.mark.parametrize("name", WITHOUT_ROWS)
def test_tile_refuses_results_without_a_row_per_token(name: str, half: Half) -> None:
    """In the same words: a length of two is t in PyTorch, which runs fn on two tokens first, and here in JAX's short shard."""
    fn, shape, got = WITHOUT_ROWS[name]
    with pytest.raises(SpecError) as caught:
        import_module(NAMES[half].package).tile(fn, num_shards=2)(ADAPTERS[half].from_numpy(np.ones(shape, np.float32)))
    advice = "fn has to return one row for each token of its shard."
    assert str(caught.value) == f"tile: output 0 of fn must be {ROWS}, got {got}. {advice}"
