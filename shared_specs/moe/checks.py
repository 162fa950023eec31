"""Checks of the mixture of experts, before any work: the same text in both halves."""

from collections.abc import Mapping

from shared_specs.config import JAX, SCORINGS, HalfNames, Tiling
from shared_specs.core import checks
from shared_specs.core.checks import Operand, check_devices, check_flags, check_kinds, check_weight, is_one_of
from shared_specs.errors import fail, fail_type, show_shape
from shared_specs.mlp.checks import check_activation

EXPERT_WEIGHTS = ("w_gate", "w_up", "w_down")


def check_choice(function: str, *, experts: int, top_k: object, scoring: object, **flags: object) -> None:
    """Check how a token chooses its experts.

    Raises:
        SpecError: top_k is no number of experts, or the scoring is unknown.
        TypeError: top_k is no integer, or a flag is neither True nor False.
    """
    if not checks.is_integer(top_k):
        fail_type(function, "top_k", "an integer", type(top_k).__name__)
    if not 1 <= top_k <= experts:
        fail(function, "top_k", f"in [1, {experts}], the number of experts", top_k)
    if not is_one_of(scoring, SCORINGS):
        fail(function, "scoring", "one of " + ", ".join(SCORINGS), repr(scoring))
    check_flags(function, **flags)


def check_moe(
    function: str, *, x: Operand, weights: Mapping[str, Operand], names: HalfNames, master_weights: bool = False
) -> None:
    """Check the shapes, dtypes and devices of one call. `weights` holds w_router, w_gate, w_up and w_down.

    The dtypes are as in `check_mlp`.

    Raises:
        SpecError: one of them disagrees.
    """
    if not x.shape:
        fail(function, "x", "[hidden], [tokens, hidden] or more dims", show_shape(x.shape))
    for name in EXPERT_WEIGHTS:
        if len(weights[name].shape) != 3:
            fail(function, name, f"[experts, {names.layout[1:]}", show_shape(weights[name].shape))
    router, hidden = weights["w_router"], x.shape[-1]
    experts, *matrix = weights["w_up"].shape
    inputs, outputs = matrix if names.input_dim_first else matrix[::-1]
    if hidden not in (inputs, outputs):
        fail(function, "x", f"[..., {inputs}], the input size of w_up", show_shape(x.shape))
    intermediate = outputs if inputs == hidden else inputs
    if len(router.shape) != 2:
        fail(function, "w_router", f"a matrix {names.layout}", show_shape(router.shape))
    check_weight(function, "w_router", router, ("hidden", hidden), ("experts", experts), names)
    into, out = ("hidden", hidden), ("intermediate", intermediate)
    for name in EXPERT_WEIGHTS:
        sizes = (out, into) if name == "w_down" else (into, out)
        _check_experts(function, name, weights[name], experts, *sizes, names)
    check_kinds(function, x, weights, master_weights=master_weights)
    check_devices(function, {"x": x, **weights})


def _check_experts(
    function: str,
    name: str,
    weight: Operand,
    experts: int,
    inputs: tuple[str, int],
    outputs: tuple[str, int],
    names: HalfNames,
) -> None:
    """Raise SpecError where the matrices of all experts are not of these sizes, (label, size), in the half's layout."""
    want = (experts, *names.weight_shape(inputs[1], outputs[1]))
    if weight.shape == want:
        return
    labels = (inputs[0], outputs[0]) if names.input_dim_first else (outputs[0], inputs[0])
    advice = f"{names.package} keeps weights {names.layout}."
    if weight.shape == (experts, *want[:0:-1]):
        advice += " This one is transposed."
    rule = f"[experts, {labels[0]}, {labels[1]}] = {show_shape(want)}"
    fail(function, name, rule, show_shape(weight.shape), advice=advice)


def check_moe_weights(function: str, weights: Mapping[str, Operand], names: HalfNames) -> None:
    """Check the weights of a mixture of experts before there is an x; one row, in w_up's dtype, stands in for it.

    Raises:
        SpecError: a shape, dtype or device disagrees.
    """
    up = weights["w_up"]
    checks.check_float(function, "w_up", up.dtype)
    hidden = up.shape[1 if names.input_dim_first else 2] if len(up.shape) == 3 else 0
    check_moe(function, x=Operand((1, hidden), up.dtype), weights=weights, names=names)


def moe_shapes(
    function: str, hidden_size: int, intermediate_size: int, num_experts: int, names: HalfNames
) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every parameter of a module; SpecError, TypeError for what is no size."""
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_experts": num_experts}
    checks.check_sizes(function, sizes)
    H, I, E = map(int, sizes.values())  # noqa: E741
    first, last = (E, *names.weight_shape(H, I)), (E, *names.weight_shape(I, H))
    return {"w_router": names.weight_shape(H, E), "w_gate": first, "w_up": first, "w_down": last}


def moe_tiling(
    function: str,
    num_shards: int | None,
    tiling: Tiling | None,
    backend: str,
    *,
    names: HalfNames,
    usable: Mapping[str, str | None],
    x: tuple[int, ...] | None = None,
) -> Tiling:
    """Return the checked tiling of a call, or of a module when it is made.

    Raises:
        SpecError: an argument is out of range, or a field has no use here. TypeError: one is of the wrong kind.
        UnsupportedError: the backend cannot run here.
    """
    unused = ("keep", "vocab_shards", "deterministic")
    found = checks.resolve_tiling(
        function, num_shards, 0.0, tiling, x=x, unused=unused, token_axes=names.half == JAX.half
    )
    checks.check_backend(function, backend, names, usable)
    return found


def check_module_options(
    function: str, *, experts: int, top_k: object, scoring: object, activation: object, **flags: object
) -> None:
    """Check the options of a module when it is made.

    Raises:
        SpecError: one is wrong. TypeError: one is of the wrong kind.
    """
    check_choice(function, experts=experts, top_k=top_k, scoring=scoring, **flags)
    check_activation(function, activation)
