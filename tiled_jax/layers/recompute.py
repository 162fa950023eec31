"""What backward keeps of a stack of layers and what it computes again, by `shared_specs.config.Checkpointing`.

One layer at a time: `checkpointed`. Stacked layers in one rolled loop: `scan_layers`. An output that nobody keeps:
`checkpoint_without_output`.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from shared_specs.config import SELECTIVE_MODES, Checkpointing, ParallelConfig
from shared_specs.errors import UnsupportedError, error_text, fail, fail_type
from shared_specs.layers.host_memory import check_pool, pool_bytes
from shared_specs.plans.checks import check_parallel_config
from tiled_jax.collectives.conjugates import PART_OF_SUM
from tiled_jax.layers.attention import ATTENTION

Layer = Callable[..., Any]
INPUT, PRODUCT = "layer_input", "layer_product"
_HOST = "pinned_host"


def checkpointed(layer: Layer, checkpointing: Checkpointing | None, *, index: int = 0) -> Layer:
    """Return `layer` with the same results, which keeps for backward what the configuration selects at `index`.

    Args:
        layer: fn(x, *more) -> x, of arrays and pytrees of them (parameters, modules). Random numbers from keys among its
            arguments are the same in recomputation.
        checkpointing: mode "full" keeps only the arguments. "layers" does so if index is every-1, 2 every-1, ... and keeps
            everything in the other layers. "products" keeps the arguments and the results of the first, third, ... matrix
            product. It does not count products inside a loop, a `custom_vjp` such as `tiled_mlp`, or another checkpoint. "op"
            also keeps the output of attention (of `causal_attention`, and of a product with a softmax, as in
            `jax.nn.dot_product_attention`) and the results of reduce-scatters (`lax.psum_scatter`, and those of
            `tiled_jax.parallel`). Neither is recomputed. Probabilities are recomputed, and so is attention with its own
            derivative rule. "op" does not count products per head. With `offload`, x and all named values stay in host memory
            until backward. None returns the layer.
        index: of the layer in its stack, for mode "layers".
    Memory: let each of L layers have x bytes of input, p bytes of every second product and a bytes of everything. "full" keeps
        L x, "products" L (x + p), and "layers" (L // every) x + (L - L // every) a. "op" keeps L (x + p + o + r): o is the
        attention's output, B S heads d elements, and r is this device's parts of sums.
    Raises:
        SpecError: a mode without its options. TypeError: not a Checkpointing.
        UnsupportedError: offload on devices without separate host memory, or with mode "layers". Or, where a gradient is
            traced, the inputs need more than JAX's pool of pinned memory.
    Source: `jax.checkpoint` with policies over `checkpoint_name`; every second product, and "op", are torchtitan's
        selective modes.
    Example:
        >>> layer = checkpointed(lambda x, w: x + jax.numpy.tanh(x @ w), Checkpointing(mode="products"))
        >>> jax.grad(lambda x, w: layer(x, w).sum())(jax.numpy.ones((2, 4)), jax.numpy.ones((4, 4))).shape
        (2, 4)
    """
    _check("checkpointed", checkpointing)
    return one_of_layers(layer, checkpointing, index=index, count=1)


def one_of_layers(layer: Layer, checkpointing: Checkpointing | None, *, index: int, count: int) -> Layer:
    """Return `checkpointed(layer)`, of checked options; count: of the layers whose inputs wait at the same time."""
    if checkpointing is None or not _replays(checkpointing, index):
        return layer
    named = _with_names(layer, checkpointing.mode == "op") if checkpointing.mode in SELECTIVE_MODES else layer
    given = _with_named_input(named) if checkpointing.offload else named

    def replayed(*args: Any) -> Any:
        policy = _policy(checkpointing)
        if checkpointing.offload:
            policy = _with_room(policy, args[0], count)
        # A function of its own for every call: JAX remembers what it traced by the function, and with that the arrays that
        # the function closed over then, such as a module's parameters before the last step.
        return jax.checkpoint(lambda *args: given(*args), policy=policy)(*args)

    return replayed


def scan_layers(layer: Layer, x: Any, parameters: Any, checkpointing: Checkpointing | None) -> Any:
    """Compute x = layer(x, parameters of one layer) for all layers, in one rolled loop under a checkpointing policy.

    Mode "layers" rolls groups of `every` layers and compiles each layer of a group. Layers beyond the last whole group keep
    everything; they run in a separate loop, which costs a copy of the parameters. With every > 1 the loop has its own backward
    rule, and JAX refuses forward-mode derivatives of it (TypeError).

    Args:
        layer: as for `checkpointed`. x: array or pytree of arrays; no layer changes its type.
        parameters: pytree of arrays with a leading dim of layers.
    Raises:
        As `checkpointed`. SpecError: no parameters, or leading dims that differ.
    """
    _check("scan_layers", checkpointing)
    count = _layers(parameters)
    if checkpointing is None or checkpointing.mode != "layers" or checkpointing.every == 1:
        one = one_of_layers(layer, checkpointing, index=0, count=count)
        return lax.scan(lambda x, p: (one(x, p), None), x, parameters)[0]
    every = checkpointing.every or 1
    groups, rest = divmod(count, every)

    def group(x: Any, p: Any) -> tuple[Any, None]:
        for place in range(every):
            # The parameters are cut inside: what backward keeps is the loop's own stack, and no copy of a slice of it.
            def cut(p: Any, place: int = place) -> Any:
                return jax.tree.map(lambda a: a[place], p)

            if _replays(checkpointing, place):
                x = jax.checkpoint(lambda x, p, cut=cut: layer(x, cut(p)))(x, p)
            else:
                x = _keeping_all_but(cut, lambda p, x: layer(x, p), p, x)
        return x, None

    if groups:
        stacked = jax.tree.map(lambda a: a[: groups * every].reshape(groups, every, *a.shape[1:]), parameters)
        x = lax.scan(group, x, stacked)[0]
    if rest:
        tail = jax.tree.map(lambda a: a[groups * every :], parameters)
        x = lax.scan(lambda x, p: (layer(x, p), None), x, tail)[0]
    return x


def checkpoint_without_output(fn: Layer, consumer: Callable[[Any], Any]) -> Layer:
    """Return consumer(fn(...)); backward keeps the consumer's residuals except the output of fn, and recomputes fn.

    Use it if the output is cheap to compute and large to keep, such as that of a norm or an activation before a product. The
    residuals of fn are not kept either, only its arguments.

    Args:
        fn: of arrays and pytrees of them. consumer: takes only the result of fn. Both may close over arrays, also of integers
            and keys, and gradients reach those arrays.
    Memory: the arguments of fn, and the consumer's residuals except the arrays that fn returned.
    Raises: JAX's TypeError for forward-mode derivatives, because the function has its own backward rule.
    Source: the role of Megatron-LM's CheckpointWithoutOutput, which frees storage by a hook where JAX has none.
    Example:
        >>> normed_product = checkpoint_without_output(jax.nn.standardize, lambda y: y @ jax.numpy.ones((4, 3)))
        >>> normed_product(jax.numpy.ones((2, 4))).shape
        (2, 3)
    """

    def call(*args: Any) -> Any:
        made = _Converted(fn, *args)
        used = _Converted(consumer, made(made.closed_over, *args))
        return _apart(made, used, again=True)((args, made.closed_over), used.closed_over)

    return call


def offload_refused(checkpointing: Checkpointing | None = None) -> str | None:
    """Return why nothing can wait in host memory here, or not in a mode; None where it can.

    On a CPU it is the memory of the device, by another name: the program runs as on a GPU, and saves nothing.
    """
    if checkpointing is not None and checkpointing.mode == "layers":
        return "What a layer without recomputation keeps has no names; take full or products."
    device = jax.devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    if _HOST not in kinds:
        return f"The devices have the memories {', '.join(sorted(kinds))} and not {_HOST}."
    return None


def _check(function: str, checkpointing: Checkpointing | None) -> None:
    if checkpointing is None:
        return
    if not isinstance(checkpointing, Checkpointing):
        fail_type(function, "checkpointing", "a Checkpointing or None", type(checkpointing).__name__)
    check_parallel_config(function, ParallelConfig(checkpointing=checkpointing), {}, "jax")
    reason = offload_refused(checkpointing) if checkpointing.offload else None
    if reason is not None:
        raise UnsupportedError(error_text(function, "offload", "False here", True, advice=reason))


def _replays(checkpointing: Checkpointing, index: int) -> bool:
    """Return whether the layer at `index` is computed again."""
    return checkpointing.mode != "layers" or (index + 1) % (checkpointing.every or 1) == 0


def _policy(checkpointing: Checkpointing) -> Any:
    """Return the policy that says what a recomputed layer keeps beside its arguments; None: nothing."""
    names = {"products": [PRODUCT], "op": [PRODUCT, ATTENTION, PART_OF_SUM]}.get(checkpointing.mode, [])
    if not checkpointing.offload:
        return jax.checkpoint_policies.save_only_these_names(*names) if names else None
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[INPUT, *names],
        offload_src="device",
        offload_dst=_HOST,
    )


def _with_room(policy: Any, x: Any, count: int) -> Any:
    """Return a policy that checks, where it is asked about a layer's input, that those of all layers fit in pinned memory.

    It is asked where a gradient is traced. How x is split is known inside `shard_map` alone; elsewhere it is whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    devices = math.prod(mesh.shape[axis] for axis in mesh.manual_axes)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(x) if hasattr(leaf, "dtype"))

    def checked(primitive: Any, *of: Any, **parameters: Any) -> Any:
        pool = _pool()
        if pool is not None and parameters.get("name") == INPUT:
            check_pool(count, count * size * devices // jax.process_count(), pool)
        return policy(primitive, *of, **parameters)

    return checked


def _pool() -> int | None:
    """Return the bytes of pinned memory that this process may have; None where its devices are no GPUs."""
    return pool_bytes() if jax.devices()[0].platform == "gpu" else None


def _layers(parameters: Any) -> int:
    counts = {a.shape[:1] for a in jax.tree.leaves(parameters)}
    if len(counts) != 1 or () in counts:
        fail("scan_layers", "parameters", "arrays with one leading dim of layers", sorted(counts))
    return counts.pop()[0]


def _with_named_input(layer: Layer) -> Layer:
    return lambda x, *more: layer(jax.tree.map(lambda a: checkpoint_name(a, INPUT), x), *more)


def _with_names(layer: Layer, operators: bool) -> Layer:
    """Return the layer, its first, third, ... matrix product under the name that the policy keeps; `operators`: more, see
    `_Names`.
    """

    def named(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(lambda *args: layer(*args), return_shape=True)(*args)
        results = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), _Names(operators))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return named


class _Names:
    """Which result of a program gets which name: every second product, with `operators` also what attention returns, the
    product of a softmax, and parts of sums."""

    def __init__(self, operators: bool) -> None:
        self._products, self._operators = itertools.count(), operators
        self._exponentials: set[Any] = set()
        self._probabilities = 0  # elements of the last softmax

    def of(self, equation: Any) -> str | None:
        kind = equation.primitive.name
        if kind == "dot_general":
            if self._operators and equation.params["dimension_numbers"][1][0]:
                return ATTENTION if self._attends(equation) else None
            return PRODUCT if next(self._products) % 2 == 0 else None
        if kind == "reduce_scatter":
            return PART_OF_SUM if self._operators else None
        if kind == "exp":
            self._exponentials.add(equation.outvars[0])
        elif _called(equation) in ("softmax", "_softmax") or (
            kind == "div" and isinstance(equation.invars[0], core.Var) and equation.invars[0] in self._exponentials
        ):
            self._probabilities = equation.outvars[0].aval.size
        return None

    def _attends(self, equation: Any) -> bool:
        """Return whether a product of every head by itself is that of the softmax before it, whatever its layout is by then."""
        elements, self._probabilities = self._probabilities, 0
        return elements > 0 and elements in [atom.aval.size for atom in equation.invars]


def _called(equation: Any) -> str | None:
    """Return the name of the function that an equation calls, such as one with a rule of its own."""
    inner = equation.params.get("call_jaxpr") if equation.primitive.name == "custom_jvp_call" else None
    return equation.params.get("name") if inner is None else inner.jaxpr.debug_info.func_name


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], names: _Names) -> list[Any]:
    """Return the results of the program, with some of them named; calls of `jit` are taken apart."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs, inner = [read(atom) for atom in equation.invars], equation.params.get("jaxpr")
        name = names.of(equation)
        if equation.primitive.name in ("jit", "pjit") and _has_products(inner.jaxpr):
            results = _evaluate(inner.jaxpr, inner.consts, inputs, names)
        else:
            with equation.ctx.manager:
                results = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
            results = results if equation.primitive.multiple_results else [results]
        if name is not None:
            results = [checkpoint_name(results[0], name)]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _has_products(jaxpr: Any) -> bool:
    return any(
        equation.primitive.name in ("dot_general", "reduce_scatter")
        or (equation.primitive.name in ("jit", "pjit") and _has_products(equation.params["jaxpr"].jaxpr))
        for equation in jaxpr.eqns
    )


def _keeping_all_but(cut: Layer, layer: Layer, p: Any, x: Any) -> Any:
    """layer(cut(p), x), keeping for backward what `layer` keeps, except what `cut` makes: that is cut once more.

    A policy of `jax.checkpoint` would say the same, but it replaces those of checkpoints inside the layer.
    """
    made = _Converted(cut, p)
    used = _Converted(layer, cut(p), x)
    return _apart(made, used, again=False)(((p,), made.closed_over), used.closed_over, x)


class _Converted:
    """fn(*args) as a function of args and of the traced arrays it closes over, of any dtype.

    `jax.closure_convert` leaves integers and keys where they are, which a rule of differentiation inside a loop cannot
    reach, and gives back an older trace of the same fn, with the values that this closed over.
    """

    def __init__(self, fn: Layer, *args: Any) -> None:
        traced, form = jax.make_jaxpr(lambda *args: fn(*args), return_shape=True)(*args)
        self._jaxpr, self._form = traced.jaxpr, jax.tree.structure(form)
        self.closed_over = tuple(traced.consts)

    def __call__(self, closed_over: Sequence[Any], *args: Any) -> Any:
        closed = core.ClosedJaxpr(self._jaxpr, closed_over)
        return jax.tree.unflatten(self._form, core.jaxpr_as_fun(closed)(*jax.tree.leaves(args)))


def _apart(made: _Converted, used: _Converted, *, again: bool) -> Any:
    """used(more, made(args), *rest) with the rule of `checkpoint_without_output`; `again`: what is made is worth hiding."""

    @jax.custom_vjp
    def run(given: tuple[Any, Any], more: Any, *rest: Any) -> Any:
        args, closed_over = given
        return used(more, made(closed_over, *args), *rest)

    def forward(given: tuple[Any, Any], more: Any, *rest: Any) -> tuple[Any, Any]:
        args, closed_over = given
        y = made(closed_over, *args)
        z, pull = jax.vjp(used, more, y, *rest)
        kept, form = jax.tree.flatten(pull)
        outputs = jax.tree.leaves(y)
        # Which residual is an output of fn: those are left out, and put back when it is computed again.
        places = tuple(next((i for i, a in enumerate(outputs) if leaf is a), None) for leaf in kept)
        others = [leaf for leaf, place in zip(kept, places, strict=True) if place is None]
        return z, (given, others, _Static((places, form)))

    def backward(saved: Any, dz: Any) -> Any:
        given, others, static = saved
        places, form = static.value
        if again:
            # Without the barrier XLA finds that fn was computed before and keeps its output after all.
            given, others, dz = lax.optimization_barrier((given, others, dz))
        y, pull_made = jax.vjp(lambda args, closed_over: made(closed_over, *args), *given)
        outputs, left = jax.tree.leaves(y), iter(others)
        kept = [next(left) if place is None else outputs[place] for place in places]
        dmore, dy, *drest = jax.tree.unflatten(form, kept)(dz)
        return pull_made(dy), dmore, *drest

    run.defvjp(forward, backward)
    return run


@jax.tree_util.register_pytree_node_class
class _Static:
    """A value that is part of a pytree's structure."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tree_flatten(self) -> tuple[tuple[()], Any]:
        return (), self.value

    @classmethod
    def tree_unflatten(cls, value: Any, _: tuple[()]) -> "_Static":
        return cls(value)
