"""Gate, up and down that come as layers: a plain nnx.Linear gives its parameters, any other (LoRA around one) is called."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen import dtypes as linen_dtypes
from flax.nnx.nn import dtypes
from jax import lax

from shared_specs.errors import SpecError, UnsupportedError, error_text, fail, fail_type
from tiled_jax.core.activation_functions import activate_alone
from tiled_jax.core.params import check_precision
from tiled_jax.core.products import linear, wide

ORDER = ("gate", "up", "down")
SUCH_AS = {"dot_general": "lax.dot_general", "promote_dtype": "flax.nnx.nn.dtypes.promote_dtype"}
# Of nnx.Linear and of linen's Dense.
OF_FLAX = {
    "dot_general": (None, lax.dot_general),
    "promote_dtype": (None, dtypes.promote_dtype, linen_dtypes.promote_dtype),
}


def reason_not_plain(name: str, layer: nnx.Module, kind: type[nnx.Linear] = nnx.Linear) -> str | None:
    """Return why a projection is more than x kernel + bias with the numerics of `tiled_mlp`; None where that is all.

    kind: the class that it must be of; of another one than nnx.Linear what that adds is not looked at.
    """
    if type(layer) is not kind:
        return f"{name} is {type(layer).__name__}"
    try:
        check_precision(name, layer.precision)
    except UnsupportedError:
        return f"{name} has a precision of its own"
    own = {"dot_general": lax.dot_general, "promote_dtype": dtypes.promote_dtype, "preferred_element_type": None}
    for option, default in own.items():
        if getattr(layer, option, default) is not default:
            return f"{name} has a {option} of its own"
    more = [
        key for key, value in vars(layer).items() if isinstance(value, nnx.Variable) and key not in ("kernel", "bias")
    ]
    return f"{name} has {more[0]} besides kernel and bias" if more else None


def reason_of_products(module: Any) -> str | None:
    """Return why the products of a `TiledMLP` are not those of `tiled_mlp`; None where they are."""
    names = [name for name in ("dot_general", "promote_dtype") if getattr(module, name, None) is not None]
    return f"the module has a {names[0]} of its own" if names else None


def check_products(function: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return a module's dot_general and promote_dtype; None for the functions that Flax's layers have by default.

    Raises:
        TypeError: one cannot be called.
    """
    for name, value in given.items():
        if value is not None and not callable(value):
            fail_type(function, name, f"a function such as {SUCH_AS[name]}", type(value).__name__)
    return {name: None if value in OF_FLAX[name] else value for name, value in given.items()}


def plain_variables(name: str, layer: nnx.Linear) -> dict[str, nnx.Param]:
    """Return the variables of a plain layer by the names of `TiledMLP`: w_gate, and b_gate where there is a bias."""
    found = {f"w_{name}": layer.kernel}
    # An nnx.Linear without a bias holds a variable of None in some releases.
    if isinstance(layer.bias, nnx.Variable) and layer.bias.get_value() is not None:
        found[f"b_{name}"] = layer.bias
    return found


def check_layers(function: str, layers: dict[str, Any]) -> None:
    """Check that projections are nnx layers, and that they compute in one dtype where they are an nnx.Linear.

    Raises:
        TypeError: one is no nnx module that can be called. SpecError: their dtypes differ.
    """
    for name, layer in layers.items():
        if not isinstance(layer, nnx.Module) or not callable(layer):
            fail_type(function, name, "an nnx layer", type(layer).__name__, advice="Such as nnx.Linear or nnx.LoRA.")
    found = {name: layer.dtype for name, layer in layers.items() if type(layer) is nnx.Linear}
    if len({None if dtype is None else jnp.dtype(dtype) for dtype in found.values()}) > 1:
        got = ", ".join(f"{name}: {None if dtype is None else jnp.dtype(dtype).name}" for name, dtype in found.items())
        fail(function, "dtype of the layers", "the same", got)


def check_once(function: str, module: nnx.Module, names: tuple[str, ...]) -> None:
    """Check that what is called in the place of a projection stands beside no weight of it, which nothing would use.

    Raises:
        SpecError: it does.
    """
    for name in names:
        if hasattr(module, f"w_{name}") or hasattr(module, "w_gate_up"):
            raise SpecError(
                error_text(
                    function,
                    name,
                    "the only form of its projection",
                    f"{type(getattr(module, name)).__name__} beside a weight of the module",
                    advice="Wrap the layers and give them to from_linears: to_linears returns those of a module.",
                )
            )


def as_layer(module: Any, name: str) -> nnx.Module | None:
    """Return a projection of a `TiledMLP` as a layer of the same variables; None for the gate of a plain MLP."""
    if (layer := getattr(module, name, None)) is not None:
        return layer
    if (weight := getattr(module, f"w_{name}", None)) is None:
        return None
    bias = getattr(module, f"b_{name}", None)
    options = {"dtype": module.dtype, "param_dtype": weight.dtype, **_products_of(module)}
    layer = nnx.Linear(1, 1, use_bias=bias is not None, **options, rngs=nnx.Rngs(0))
    layer.in_features, layer.out_features = weight.shape[-2:]  # of a stack of layers too
    layer.kernel = weight
    if bias is not None:
        layer.bias = bias
    return layer


def _products_of(module: Any) -> dict[str, Any]:
    """Return the arguments of nnx.Linear in which a module's products differ from its default."""
    found = {name: getattr(module, name, None) for name in ("dot_general", "promote_dtype")}
    return {name: value for name, value in found.items() if value is not None}


def whole(module: Any, x: jax.Array) -> jax.Array:
    """Return the MLP of all tokens of x, its projections called: what a shard of `tile` runs."""
    x = x if module.dtype is None or module.promote_dtype is not None else x.astype(module.dtype)
    up = _project(module, "up", x)
    gate = _project(module, "gate", x) if module.config.gated else up
    h = activate_alone(module.config.activation, gate.astype(wide(gate.dtype)))
    h = h * up.astype(h.dtype) if module.config.gated else h
    return _project(module, "down", h.astype(up.dtype))


def _project(module: Any, name: str, x: jax.Array) -> jax.Array:
    if (layer := getattr(module, name, None)) is not None:
        return layer(x)
    weight, bias = (_parameter(module, kind, name) for kind in ("w", "b"))
    if reason_of_products(module) is not None:
        return _own_product(module, x, weight, bias)
    dtype = module.dtype or jnp.result_type(x, weight)
    rows = x.reshape(-1, x.shape[-1]).astype(dtype)
    y = linear(rows, weight.astype(dtype), None if bias is None else bias.astype(dtype))
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _parameter(module: Any, kind: str, name: str) -> Any:
    """Return the weight or the bias of a projection as an array; None where there is no bias."""
    found, first = getattr(module, f"{kind}_{name}", None), name == "gate"
    both = getattr(module, f"{kind}_gate_up", None) if found is None and name != "down" else None
    if both is not None:
        return jnp.split(jnp.asarray(both[...]), 2, axis=-1)[0 if first else 1]
    return None if found is None else found[...]


def _own_product(module: Any, x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Return x weight + bias as nnx.Linear computes it with the module's dot_general and promote_dtype."""
    promote, product = module.promote_dtype or dtypes.promote_dtype, module.dot_general or _product
    x, weight, bias = promote((x, weight, bias), dtype=module.dtype)
    y = product(x, weight, (((x.ndim - 1,), (0,)), ((), ())), precision=module.precision)
    return y if bias is None else y + bias


def _product(x: jax.Array, weight: jax.Array, dimensions: Any, *, precision: Any) -> jax.Array:
    """Return x weight as `tiled_mlp` computes it."""
    del dimensions, precision
    return linear(x.reshape(-1, x.shape[-1]), weight, None).reshape(*x.shape[:-1], weight.shape[-1])
