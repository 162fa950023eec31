"""`tile` where a mesh cuts the tokens: every device runs fn on shards of its own, and what shards share gets one sum.

How many tokens a device has is known where the partitioner says so, which is after fn can be traced. So fn is traced for the
lengths of shard that any even cut leads to, mostly one, with what it closes over made arguments.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from shared_specs.config import Tiling
from shared_specs.errors import UnsupportedError, error_text
from shared_specs.shards import ShardPlan, plan_tiling
from tiled_jax import backends
from tiled_jax.core.linear_call import Arrays, Saved, differentiable
from tiled_jax.core.loops import gradient_of
from tiled_jax.core.own_tokens import Split, TokenOp, as_typed, on_own_tokens, shapes
from tiled_jax.core.products import wide
from tiled_jax.tile.shared_gradients import Twins, with_gradient_of

_OF = "tangent of "


def plans(split: Split, tokens: int, options: Tiling) -> dict[int, ShardPlan]:
    """Return the plan of a device, by how many of the tokens it may have."""
    sizes = split.mesh.shape
    if split.tokens is None:
        subsets = chain.from_iterable(combinations(sizes.values(), count) for count in range(len(sizes) + 1))
        parts = {math.prod(subset) for subset in subsets}
    else:
        parts = {math.prod(sizes[axis] for axis in split.token_axes)}
    device = backends.device_kind()

    def plan(own: int) -> ShardPlan:
        return plan_tiling(own, options, device=device)

    return {tokens // n: plan(tokens // n) for n in parts if tokens % n == 0}


def shards_in_all(found: dict[int, ShardPlan], tokens: int) -> int:
    """Return how many shards there may be on all devices together."""
    return max(len(plan) * (tokens // own) for own, plan in found.items())


@dataclass(frozen=True, eq=False)
class _Traced:
    """fn for the lengths of shard that there may be. Static; operands are named by kind and number.

    at: for every length fn as a jaxpr, and which constants it takes. held: how many constants, the first ones, it takes as
    arguments. keys: how the numbers of the random keys are keys again; constants: the same of constants.
    """

    split: Split
    plans: dict[int, ShardPlan]
    at: dict[int, tuple[Any, tuple[int, ...]]]
    held: int
    keys: tuple[Any, ...]
    constants: tuple[Any, ...]
    rows: int

    def loop(self, rows: Sequence[jax.Array], constants: Sequence[Twins], keys: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the rows of every result of this device's tokens; keys: one for each of its shards.

        constants: each with what takes its gradient, seen in every shard: else a loop adds up in the dtype of the constant.
        """
        plan = self.plans[rows[0].shape[0]]
        t, count = plan.shard_tokens, len(plan)

        def run(length: int) -> Any:
            jaxpr, taken = self.at[length]

            def of_shard(keys: Sequence[jax.Array], pieces: Sequence[jax.Array]) -> list[jax.Array]:
                own = [a if twin is a else with_gradient_of(a, twin) for a, twin in constants]
                fn = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr.jaxpr, [own[i] for i in taken]))
                return fn(*keys, *pieces, *own[: self.held])

            return of_shard

        if count == 1:
            return jax.checkpoint(run(t))([key[0] for key in keys], rows)
        equal = plan.tokens // t
        stop = equal * t
        last = None
        if stop < plan.tokens:
            last = jax.checkpoint(run(plan.tokens - stop))([key[-1] for key in keys], [a[stop:] for a in rows])
        cut = [a[:stop].reshape(equal, t, *a.shape[1:]) for a in rows]
        body = jax.checkpoint(run(t), prevent_cse=False)
        _, found = lax.scan(lambda _, given: (None, body(*given)), None, ([key[:equal] for key in keys], cut))
        found = [a.reshape(-1, *a.shape[2:]) for a in found]
        return found if last is None else [jnp.concatenate(pair) for pair in zip(found, last, strict=True)]

    def on_device(self, rows: Arrays, whole: Arrays, moved: Arrays) -> Arrays:
        """Return the results of this device; `moved`: rows, and float32 twins of constants, to differentiate in."""
        count = len(self.plans[rows["x"].shape[0]])
        at = whole["device"] * count if "device" in whole else 0
        own = [lax.dynamic_slice_in_dim(whole[f"key {i}"], at, count) for i in range(len(self.keys))]
        keys = [_as_key(a, impl) for a, impl in zip(own, self.keys, strict=True)]
        names = ["x", *(f"row {i}" for i in range(1, self.rows))]
        pieces = [moved.get(name, rows[name]) for name in names]
        constants: list[Twins] = []
        for i, impl in enumerate(self.constants):
            name = f"constant {i}"
            a = _as_key(whole[name], impl)
            twin: Any = moved.get(name, a)
            constants.append((twin, twin) if twin.dtype == a.dtype else (a, twin))
        return {f"result {i}": a for i, a in enumerate(self.loop(pieces, constants, keys))}


class _TileRules:
    """Operands: "x", "row 1", ...; "constant 0", ...; "key 0", ...; results: "result 0", ..."""

    @staticmethod
    def forward(call: _Traced, operands: Arrays) -> Arrays:
        rows, whole = _rows_and_whole(operands)
        run = _op(lambda rows, whole, axes: (call.on_device(rows, whole, {}), {}))
        return on_own_tokens(call.split, run)(rows, whole)[0]

    @staticmethod
    def save(call: _Traced, operands: Arrays, wanted: tuple[str, ...]) -> tuple[Arrays, Saved]:
        return _TileRules.forward(call, operands), Saved(operands)

    @staticmethod
    def tangents(call: _Traced, saved: Saved, t: Arrays, results: tuple[str, ...]) -> Arrays:
        rows, whole = _rows_and_whole(saved.arrays)

        def run(rows: Arrays, whole: Arrays, axes: tuple[str, ...]) -> tuple[Arrays, Arrays]:
            given = rows | whole
            of = {name: given[_OF + name] for name in t}
            fn, primals = _function_of(call, rows, whole, tuple(t), results)
            moved = {name: of[name].astype(a.dtype) for name, a in primals.items()}
            return jax.jvp(fn, (primals,), (moved,))[1], {}

        of_rows, of_whole = _rows_and_whole(t)
        rows |= {_OF + name: a for name, a in of_rows.items()}
        whole |= {_OF + name: a for name, a in of_whole.items()}
        return on_own_tokens(call.split, _op(run))(rows, whole)[0]

    @staticmethod
    def gradients(call: _Traced, saved: Saved, g: Arrays, wanted: tuple[str, ...]) -> Arrays:
        rows, whole = _rows_and_whole(saved.arrays)

        def run(rows: Arrays, whole: Arrays, axes: tuple[str, ...]) -> tuple[Arrays, Arrays]:
            fn, primals = _function_of(call, rows, whole, wanted, tuple(g))
            (d,) = jax.vjp(fn, primals)[1]({name: rows[name] for name in g})
            return _rows_and_whole(d)

        found = {}
        for group in on_own_tokens(call.split, _op(run))(rows | g, whole):
            found |= group
        found = {name: gradient_of(saved.arrays[name], d) for name, d in found.items()}
        return {name: as_typed(saved.arrays[name], d) for name, d in found.items()}


def _function_of(
    call: _Traced, rows: Arrays, whole: Arrays, names: tuple[str, ...], results: tuple[str, ...]
) -> tuple[Any, Arrays]:
    """Some results as a function of some operands, and those: constants in float32, in which their gradients are summed."""
    of_rows, of_whole = _rows_and_whole({name: (rows | whole)[name] for name in names})
    primals = of_rows | {name: a.astype(wide(a.dtype)) for name, a in of_whole.items()}

    def fn(moved: Arrays) -> Arrays:
        found = call.on_device(rows, whole, moved)
        return {name: found[name] for name in results}

    return fn, primals


def _rows_and_whole(operands: Arrays) -> tuple[Arrays, Arrays]:
    def is_row(name: str) -> bool:
        return name == "x" or name.startswith("row ")

    return {n: a for n, a in operands.items() if is_row(n)}, {n: a for n, a in operands.items() if not is_row(n)}


def _op(run: Any) -> TokenOp:
    return TokenOp(run, column_dim=lambda name: None, numbered=True)


def _numbers(a: Any) -> tuple[Any, Any]:
    """Return an array that the partitioner takes, and what makes it a random key again where it was one."""
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(a), jax.random.key_impl(a)
    return a, None


def _as_key(a: jax.Array, impl: Any) -> Any:
    return a if impl is None else jax.random.wrap_key_data(a, impl=impl)


def run_split(
    function: str,
    run: Any,
    arrays: Sequence[jax.Array],
    keys: Sequence[jax.Array],
    split: Split,
    found: dict[int, ShardPlan],
    held: Sequence[jax.Array],
) -> list[jax.Array]:
    """run(keys, pieces, held) -> rows of results, of every device's own shards.

    arrays: [*leading dims, ...], x first. keys: for every shard of all devices. found: what `plans` found. held: what run has
    to be given because it cannot close over it.
    """
    lead = arrays[0].ndim - 1
    constants: list[Any] = list(held)
    numbers: dict[int, int] = {}  # of a constant that run closes over, by its id
    at = {}
    lengths = {length for plan in found.values() for length in (plan.shard_tokens, plan.tokens % plan.shard_tokens)}
    for length in sorted(lengths - {0}):
        pieces = [jax.ShapeDtypeStruct((length, *a.shape[lead:]), a.dtype) for a in arrays]
        example = [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in keys], pieces, shapes(held)
        traced = _trace(function, run, split, example)
        for a in traced.consts:
            if id(a) not in numbers:
                numbers[id(a)] = len(constants)
                constants.append(a)
        at[length] = traced, tuple(numbers[id(a)] for a in traced.consts)
    of_keys, of_constants = [_numbers(a) for a in keys], [_numbers(jnp.asarray(a)) for a in constants]
    call = _Traced(
        split, found, at, len(held), tuple(k for _, k in of_keys), tuple(k for _, k in of_constants), len(arrays)
    )
    operands = {"x": arrays[0]} | {f"row {i}": a for i, a in enumerate(arrays) if i}
    operands |= {f"constant {i}": a for i, (a, _) in enumerate(of_constants)}
    operands |= {f"key {i}": a for i, (a, _) in enumerate(of_keys)}
    forms = next(iter(at.values()))[0].out_avals
    fixed = [f"result {i}" for i, form in enumerate(forms) if not jnp.issubdtype(form.dtype, jnp.floating)]
    results = differentiable(_TileRules.forward, _TileRules, without=fixed)(call, operands)
    return [results[f"result {i}"] for i in range(len(forms))]


def _trace(function: str, run: Any, split: Split, example: Any) -> Any:
    """run as a jaxpr for the devices of a split.

    Raises:
        UnsupportedError: on Explicit axes run closes over an array that is on the mesh, and was not found to be handed over.
    """
    sizes, tree = zip(*(jax.tree.flatten(part) for part in example), strict=True)
    leaves = [leaf for part in sizes for leaf in part]

    # A function of its own: for `run` JAX might give back an older trace, with what that closed over.
    def flat(*given: Any) -> Any:
        rest = iter(given)
        return run(*(jax.tree.unflatten(t, [next(rest) for _ in part]) for t, part in zip(tree, sizes, strict=True)))

    if split.tokens is None:
        return jax.make_jaxpr(flat)(*leaves)
    try:
        with jax.sharding.use_abstract_mesh(split.on_device):
            return jax.make_jaxpr(flat)(*leaves)
    except NotImplementedError as error:
        if "Closing over" not in str(error):
            raise
        rule, got = "free of arrays on Explicit mesh axes that it keeps in an object", "one"
        advice = "Hand the array or the pytree that holds it to fn as an argument."
        raise UnsupportedError(error_text(function, "fn", rule, got, advice=advice)) from error
