"""`tiled_mlp`: the token-wise MLP, exact, one shard of tokens at a time: checks, the plan, and one call."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax

from shared_specs import config
from shared_specs.config import Tiling
from shared_specs.core import checks
from shared_specs.errors import fail_type
from shared_specs.kernels.blocks import DETERMINISTIC, paths_for
from shared_specs.mlp import checks as mlp_checks
from shared_specs.mlp import costs as mlp_costs
from shared_specs.mlp.sequence_costs import compiled_sequence_peak_bytes, plan_sequence_mlp
from shared_specs.shards import ShardPlan
from tiled_jax import backends
from tiled_jax.collectives.gathered_tokens import TokenAxis
from tiled_jax.core.arrays import array, operands
from tiled_jax.core.own_tokens import split_of
from tiled_jax.core.products import refuse_exchanged_products
from tiled_jax.mlp.autodiff import COLUMNS, MLPCall, run
from tiled_jax.mlp.steps import XLA, MLPSteps

_NAME = "tiled_mlp"
_ORDER = (
    'XLA adds in an order of its own; the backend "pallas" has kernels for all of the products, and runs or says why it '
    "cannot."
)
_SUMS = "Sums over devices are a communication library's, who adds in an order of its own."


def tiled_mlp(
    x: jax.Array,
    w_gate: jax.Array | None,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    biases: Mapping[str, jax.Array] | None = None,
    activation: str = "silu",
    num_shards: int | None = None,
    keep: float = 0.0,
    tiling: Tiling | None = None,
    backend: str = "auto",
) -> jax.Array:
    """Return the MLP of every token, one shard of tokens at a time, exactly.

    y = (act(x w_gate) * (x w_up)) w_down, or act(x w_up) w_down without a gate. Nothing of shape [T, I] exists, in
    forward or backward; backward computes gate and up of a shard again, never the down-projection.

    Args:
        x: [T, H], [B, S, H] or any leading dims, or [H], one token; float32 | bfloat16 | float16 | float64. The tokens.
        w_gate: [H, I], or None for a plain two-matrix MLP.
        w_up: [H, I], dtype of x; beside a 16-bit x also float32 (master weights: cast once per call).
        w_down: [I, H_out], likewise.
        biases: any of gate [I], up [I], down [H_out]; the weights' dtypes.
        activation: one of shared_specs.ACTIVATIONS.
        num_shards: at most this many shards of T, >= 1; None lets the plan choose. See shared_specs.shards.
        keep: fraction of the shards, the last ones, whose gate and up are kept instead of recomputed, in [0, 1].
        tiling: the long form of num_shards and keep, which it excludes.
            With deterministic=True y and dx are the same to the last bit at every shard count, and the gradients of
            weights and biases at every one whose shards are all of one length; kernels make every product, of a gated or
            plain MLP whose H and I are multiples of 128 (H_out of 64).
        backend: "auto" | "xla" | "pallas"; one named explicitly runs or raises. "pallas", which "auto" takes on a Hopper
            GPU, is the kernels of a gated MLP in bfloat16 or float16; shards are then multiples of 128 tokens.
    Returns:
        [same leading dims, H_out], dtype of x.
    Numerics: products accumulate in float32 and float32 products are IEEE float32; gate, up, h, y and their gradients
        are rounded to the dtype of x; elementwise work is float32. Weight gradients are summed over shards in float32
        and rounded to the weight's dtype once. float64 is float64 throughout.
    Memory: x and the weights are kept for backward, and gate and up of the kept shards
        (shared_specs.mlp.costs.saved_bytes). Compiled temporary bytes do not grow with T (costs.compiled_peak_bytes).
    Raises:
        SpecError: shapes, dtypes or devices disagree (of arrays committed to one each, outside `jit`), or a number is out
        of its range. TypeError: a wrong kind of value.
        UnsupportedError: a backend named explicitly that cannot run here; tiling.deterministic where kernels cannot make
            every product, or where weights or biases need gradients and there are shards of two lengths.
    Sharding: every device computes the tokens that it has, in shards of its own (num_shards counts those), and the gradient
        of each weight is summed over devices once a call. That holds inside `jax.shard_map`, under plain `jit` for arrays
        on an Auto mesh, and on Explicit axes. Under plain `jit` it is a `custom_partitioning`, with which JAX finds no
        program in its compilation cache on disk and serialises no export for several devices: `Tiling.token_axes` is a
        `jax.shard_map` instead. It also names the axes that a `jax.shard_map` around the call leaves out: see there.
        Derivatives of derivatives, and gradients under `jax.vmap`, are left to XLA on Auto axes, and so is
        `deterministic`. Columns of weights may be sharded too.
    Derivatives: of forward and reverse mode, and of each other.
    Source: derived in shared_specs/README.md.
    Example:
        >>> import jax.numpy as jnp
        >>> x, w = jnp.ones((2, 5, 8)), jnp.ones((8, 16)) / 8
        >>> tiled_mlp(x, w, w, w.T, num_shards=3).shape
        (2, 5, 8)
    """
    refuse_exchanged_products(_NAME, {"w_gate": w_gate, "w_up": w_up, "w_down": w_down})
    given = check_operands(
        _NAME, x, w_gate, w_up, w_down, biases, activation, num_shards, keep, tiling, backend, several=False
    )
    call = make_call(given, backend)
    y = run(call, given.rows(call), given.weights)
    return y.reshape(*given.x.shape[:-1], y.shape[-1])


class Given(NamedTuple):
    """The checked arguments of one call. `w` and `b` are named as the checks name them: w_up, and biases by projection."""

    function: str
    x: jax.Array
    w: dict[str, jax.Array]
    b: dict[str, jax.Array]
    activation: str
    options: Tiling
    usable: Mapping[str, str | None]  # what `usable_backends` says

    @property
    def shape(self) -> mlp_costs.MLPShape:
        """Return the shape of this call, as the formulas read it."""
        return mlp_costs.MLPShape(
            tokens=checks.flat_tokens(self.x.shape),
            hidden=self.x.shape[-1],
            intermediate=self.w["w_up"].shape[1],
            out=self.w["w_down"].shape[1],
            gated="w_gate" in self.w,
            activation=self.activation,
            itemsize=self.x.dtype.itemsize,
            weight_itemsize=self.w["w_up"].dtype.itemsize,
        )

    @property
    def weights(self) -> dict[str, jax.Array]:
        """Return the weights, and the biases as b_gate, b_up and b_down."""
        return self.w | {f"b_{name}": bias for name, bias in self.b.items()}

    def rows(self, call: MLPCall) -> jax.Array:
        """Return x, as [tokens, H] where no mesh cuts it."""
        return self.x if call.split is not None else self.x.reshape(self.shape.tokens, self.x.shape[-1])

    def steps(self, backend: str) -> MLPSteps:
        """Return the steps for `backend`; UnsupportedError for one named that cannot run this call."""
        chosen = backends.choose(self.function, backend, no_kernel=self._no_kernel, usable=self.usable)
        if chosen == "xla":
            checks.check_deterministic(self.function, self.options, _ORDER)
            return XLA
        from tiled_jax.core.mosaic import ARCHITECTURE
        from tiled_jax.mlp.steps_kernels import KernelMLPSteps  # where no kernel runs, Mosaic is not loaded

        widths = self.shape.intermediate, self.shape.hidden
        measured = paths_for("pallas", ARCHITECTURE, self.x.dtype.name, widths)
        paths = DETERMINISTIC if self.options.deterministic else measured
        return KernelMLPSteps(paths, interpret=backends.interpreting())

    def _no_kernel(self) -> str | None:
        """Return why the kernels cannot run this call's shards; None where they can."""
        from tiled_jax.core.mosaic import mlp_reason

        return mlp_reason(
            self.x.dtype,
            hidden=self.shape.hidden,
            intermediate=self.shape.intermediate,
            out=self.w["w_down"].shape[1],
            gated=self.shape.gated,
            deterministic=self.options.deterministic,
        )


def check_operands(
    function: str,
    x: Any,
    w_gate: Any,
    w_up: Any,
    w_down: Any,
    biases: Any,
    activation: str,
    num_shards: int | None,
    keep: float,
    tiling: Tiling | None,
    backend: str,
    *,
    several: bool = True,
) -> Given:
    """Return the arguments of `tiled_mlp`, as a public function is given them, once they are right.

    several: whether results are summed over devices, which no order of additions survives.

    Raises:
        SpecError: a shape, dtype or value is wrong.
        TypeError: an argument is of the wrong kind.
        UnsupportedError: the backend or deterministic sums cannot be had here.
    """
    x = array(function, "x", x)
    gate = {} if w_gate is None else {"w_gate": array(function, "w_gate", w_gate)}
    w = {**gate, "w_up": array(function, "w_up", w_up), "w_down": array(function, "w_down", w_down)}
    b = {name: array(function, f"biases[{name!r}]", bias) for name, bias in _biases(function, biases).items()}
    options = checks.resolve_tiling(function, num_shards, keep, tiling, x=x.shape, token_axes=not several)
    checks.check_deterministic(function, options, _SUMS if several else None)
    usable = backends.usable_backends()
    checks.check_backend(function, backend, config.JAX, usable)
    seen = operands({"x": x, **w, **{f"b_{name}": value for name, value in b.items()}})
    mlp_checks.check_mlp(
        function,
        x=seen["x"],
        weights={name: seen[name] for name in w},
        biases={name: seen[f"b_{name}"] for name in b},
        activation=activation,
        names=config.JAX,
        master_weights=True,
    )
    return Given(function, x, w, b, activation, options, usable)


def make_call(given: Given, backend: str, axis: str | None = None) -> MLPCall:
    """Return the call for the tokens that are here, which with `axis` are those of one device of that mesh axis."""
    options, w = given.options, given.weights
    columns = [(a, COLUMNS[name]) for name, a in w.items() if name in COLUMNS]
    split = split_of(given.function, given.x, w.values(), columns, options.token_axes)
    steps = given.steps(backend)
    if options.deterministic:
        split = None  # what adds over devices has an order of its own
    replan = _MakeMLPPlan(given.function, given.shape, options, backends.device_kind(), steps.multiple)
    shape = given.shape
    plan = replan(shape.tokens, shape.intermediate) if axis is None else replan.gathered(lax.axis_size(axis))
    return MLPCall(
        plan=plan,
        kept_start=plan.kept_start(options.keep),
        activation=given.activation,
        steps=steps,
        token_order=options.deterministic,
        tokens=None if axis is None else TokenAxis.of(axis, plan.shard_tokens),
        split=split,
        replan=None if split is None else replan,
    )


@dataclass(frozen=True)
class _MakeMLPPlan:
    """The plan of so many tokens, and of so many columns of the weights, of one call. Static."""

    function: str
    shape: mlp_costs.MLPShape
    options: Tiling
    device: str
    multiple_of: int

    def __call__(self, tokens: int, columns: int) -> ShardPlan:
        shape = replace(self.shape, tokens=tokens, intermediate=columns)
        return mlp_costs.plan_mlp(
            self.function, shape, **self._cut(), peak=partial(mlp_costs.compiled_peak_bytes, device=self.device)
        )

    def gathered(self, ranks: int) -> ShardPlan:
        """Return the plan of a device's own tokens where each of so many devices has as many, and shards are gathered."""
        rows = self.shape.tokens
        peak = partial(compiled_sequence_peak_bytes, device=self.device)
        plan = plan_sequence_mlp(self.function, self.shape, (rows,) * ranks, **self._cut(), peak=peak)
        return ShardPlan(rows, plan.shard_tokens)

    def _cut(self) -> dict[str, Any]:
        return {**self.options.cut(), "device": self.device, "multiple_of": self.multiple_of}


def _biases(function: str, biases: Any) -> Mapping[str, Any]:
    if biases is not None and not isinstance(biases, Mapping):
        fail_type(function, "biases", "a mapping or None", type(biases).__name__)
    return {} if biases is None else biases
