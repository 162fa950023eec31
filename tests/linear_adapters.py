"""`TiledLinear` of either half on a case: NumPy arrays in, y and gradients out as NumPy arrays, weights [in, out].

Outputs that come apart are joined, and a bias that is returned apart is added, so that every case has the same results.
"""

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from shared_specs.collectives.partitions import bounds
from shared_specs.config import NAMES, Half
from shared_specs.core.rounding import DTYPES, compute_dtype, relative_error
from shared_specs.linear.cases import LinearCase, linear_baseline, linear_oracle, make_linear_inputs
from shared_specs.tolerances import limit
from tests.adapters import ADAPTERS, Array, Results
from tests.asserting import assert_within


@cache
def linear_truth(case: LinearCase) -> tuple[dict[str, Array], dict[str, float]]:
    """The oracle's results and the largest relative error each may show."""
    oracle, baseline = linear_oracle(case), linear_baseline(case)
    return oracle, {name: limit(relative_error(baseline[name], oracle[name]), case.dtype) for name in oracle}


def assert_linear_case(case: LinearCase, actual: Results) -> None:
    """Every quantity of the case, no more and no less, in its dtype and within its limit."""
    __tracebackhide__ = True
    oracle, limits = linear_truth(case)
    assert set(actual) == set(oracle), f"{case.id}: got {sorted(actual)} instead of {sorted(oracle)}"
    for name, expected in oracle.items():
        found = actual[name]
        assert found is not None, f"{case.id} {name}: None"
        assert found.dtype == DTYPES[case.dtype], f"{case.id} {name}: dtype {found.dtype}"
        assert_within(found, expected, limits[name], f"{case.id} {name}")


def layer_options(case: LinearCase) -> dict[str, Any]:
    """The keyword arguments of `from_linear`."""
    return {
        "in_splits": case.in_splits,
        "out_splits": case.out_splits,
        "input_is_already_split": case.already_split,
        "combine_out_splits": case.combined,
    }


def layer_class(half: Half, case: LinearCase) -> Any:
    from importlib import import_module

    return getattr(import_module(NAMES[half].package), "TiledLinearReturnBias" if case.return_bias else "TiledLinear")


def given(case: LinearCase, x: Any) -> Any:
    """x as the layer takes it."""
    if not case.already_split:
        return x
    return [x[..., start:stop] for start, stop in pairwise(bounds(case.in_features, case.in_splits))]


def joined(case: LinearCase, result: Any, concatenate: Any, widened: Any) -> Any:
    """y as one array with its bias, from whatever the layer returned; its form is checked on the way.

    The bias of a layer that returns it is added in float32 (`widened`): that sum is the test's, not the layer's.
    """

    def with_bias(y: Any, bias: Any) -> Any:
        return y if bias is None else widened(y, bias)

    biases = None
    if case.return_bias:
        result, biases = result
        assert (biases is not None) == (case.bias or not case.combined)
    if case.combined:
        return with_bias(result, biases)
    assert isinstance(result, list)
    assert len(result) == case.out_splits
    if biases is not None:
        assert isinstance(biases, list)
        result = [with_bias(y, bias) for y, bias in zip(result, biases, strict=True)]
    return concatenate(result, -1)


def run_torch_linear(case: LinearCase) -> Results:
    """tiled_torch on a case; the gradients of the tiles are put together to those of the whole layer."""
    import torch

    adapter = ADAPTERS["torch"]
    arrays = {name: adapter.from_numpy(array) for name, array in make_linear_inputs(case).items()}
    plain = torch.nn.utils.skip_init(
        torch.nn.Linear, case.in_features, case.out_features, bias=case.bias, dtype=arrays["x"].dtype
    )
    with torch.no_grad():
        plain.weight.copy_(arrays["weight"].T)
        if case.bias:
            plain.bias.copy_(arrays["bias"])
    plain.weight.requires_grad_("weight" not in case.frozen)
    if case.bias:
        plain.bias.requires_grad_("bias" not in case.frozen)
    layer = layer_class("torch", case).from_linear(plain, **layer_options(case))
    x = arrays["x"].requires_grad_("x" not in case.frozen)
    y = joined(case, layer(given(case, x)), torch.cat, torch.add)
    y.backward(arrays["dy"])
    results = {"y": y, "dx": x.grad} if "x" not in case.frozen else {"y": y}
    dweight = torch.full_like(plain.weight, torch.nan)
    dbias = torch.full((case.out_features,), torch.nan, dtype=x.dtype)
    for out_id, in_id, rows, columns in layer.grid():
        tile = layer.linears[out_id][in_id]
        if "weight" not in case.frozen:
            dweight[rows, columns] = tile.weight.grad
        if case.bias and "bias" not in case.frozen and in_id == case.in_splits - 1:
            dbias[rows] = tile.bias.grad
    if "weight" not in case.frozen:
        results["dweight"] = dweight.T
    if case.bias and "bias" not in case.frozen:
        results["dbias"] = dbias
    return {name: adapter.to_numpy(tensor) for name, tensor in results.items()}


@cache
def run_jax_linear(case: LinearCase) -> Results:
    """tiled_jax on a case, under jit: differentiated through `from_linear` of a plain layer."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    adapter = ADAPTERS["jax"]
    with adapter.precision(case):
        arrays = {name: adapter.from_numpy(array) for name, array in make_linear_inputs(case).items()}
        dy = arrays.pop("dy")
        wanted = {name: array for name, array in arrays.items() if name not in case.frozen}
        dtype = arrays["x"].dtype

        def call(wanted: dict[str, Any]) -> Any:
            operands = arrays | wanted
            plain = nnx.Linear(
                case.in_features,
                case.out_features,
                use_bias=case.bias,
                dtype=dtype,
                param_dtype=dtype,
                rngs=nnx.Rngs(0),
            )
            plain.kernel[...] = operands["weight"]
            if case.bias:
                plain.bias[...] = operands["bias"]
            layer = layer_class("jax", case).from_linear(plain, **layer_options(case))
            return joined(case, layer(given(case, operands["x"])), jnp.concatenate, widened)

        def widened(y: Any, bias: Any) -> Any:
            wide = compute_dtype(case.dtype)
            return (y.astype(wide) + bias.astype(wide)).astype(y.dtype)

        @jax.jit
        def y_and_gradients(wanted: dict[str, Any], dy: Any) -> dict[str, Any]:
            y, pull = jax.vjp(call, wanted)
            return {"y": y} | {f"d{name}": grad for name, grad in pull(dy)[0].items()}

        return {name: np.asarray(array) for name, array in y_and_gradients(wanted, dy).items()}


RUNNERS = {"torch": run_torch_linear, "jax": run_jax_linear}
