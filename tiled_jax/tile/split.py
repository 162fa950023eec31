"""`tile` where a mesh cuts the tokens: every device runs fn on shards of its own, and what shards share gets one sum.

How many tokens a device has is known where the partitioner says so, which is after fn can be traced. So fn is traced for the
lengths of shard that any even cut leads to, mostly one, with what it closes over made arguments.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
from tiled_jax.core.loops import gradient_of, vary_over, varying_of
from tiled_jax.core.own_tokens import Split, TokenOp, as_typed, on_own_tokens, shapes
from tiled_jax.core.products import wide
from tiled_jax.core.row_shards import counted_first, rows_of, with_rows
from tiled_jax.core.turns import for_each_of_first
from tiled_jax.tile.shared_gradients import Twins, with_gradient_of

_OF = "tangent of "


def plans(split: Split | None, tokens: int, options: Tiling) -> dict[int, ShardPlan]:
    """Return the plan of a device, by how many of the tokens it may have."""
    sizes = {} if split is None else split.mesh.shape
    if split is None or split.tokens is None:
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
    arguments. keys: how the numbers of the random keys are keys again; constants: the same of constants. counted: whether the
    last row says of every token whether it counts; those that do come first, and no more shards are run than they need.
    """

    split: Split | None
    plans: dict[int, ShardPlan]
    at: dict[int, tuple[Any, tuple[int, ...]]]
    held: int
    keys: tuple[Any, ...]
    constants: tuple[Any, ...]
    rows: int
    counted: bool = False

    def loop(self, rows: Sequence[jax.Array], constants: Sequence[Twins], keys: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the rows of every result of this device's tokens; keys: one for each of its shards.

        constants: each with what takes its gradient, seen in every shard: else a loop adds up in the dtype of the constant.
        """
        plan = self.plans[rows[0].shape[0]]
        t, count = plan.shard_tokens, len(plan)
        run = partial(self._shard, constants)
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

    def _shard(self, constants: Sequence[Twins], length: int) -> Callable[..., list[jax.Array]]:
        """Return fn of a shard of so many tokens: (keys, pieces) -> results."""
        jaxpr, taken = self.at[length]

        def of_shard(keys: Sequence[jax.Array], pieces: Sequence[jax.Array]) -> list[jax.Array]:
            own = [a if twin is a else with_gradient_of(a, twin) for a, twin in constants]
            fn = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr.jaxpr, [own[i] for i in taken]))
            return fn(*keys, *pieces, *own[: self.held])

        return of_shard

    @property
    def _names(self) -> list[str]:
        """Return the names of the rows that fn is given."""
        return ["x", *(f"row {i}" for i in range(1, self.rows - self.counted))]

    def on_device(self, rows: Arrays, whole: Arrays, moved: Arrays) -> Arrays:
        """Return the results of this device; `moved`: rows, and float32 twins of constants, to differentiate in."""
        pieces, constants = {name: moved.get(name, rows[name]) for name in self._names}, self._twins(whole, moved)
        keys = self._keys(rows, whole)
        if not self.counted:
            return _numbered(self.loop([*pieces.values()], constants, keys))
        axes = varying_of([*rows.values(), *whole.values(), *moved.values()])

        def shard(start: Any, place: jax.Array, found: list[jax.Array]) -> list[jax.Array]:
            own = [rows_of(a, place, place.shape[0]) for a in pieces.values()]
            of_shard = self._shard(constants, place.shape[0])(self._keys_of(keys, start, rows), own)
            return [with_rows(a, vary_over(b, axes), place) for a, b in zip(found, of_shard, strict=True)]

        tokens, (jaxpr, _) = rows["x"].shape[0], next(iter(self.at.values()))
        zeros = [jnp.zeros((tokens, *form.shape[1:]), form.dtype) for form in jaxpr.out_avals]
        return _numbered(self._for_each_counted(rows, shard, [vary_over(a, axes) for a in zeros]))

    def gradients_on_device(self, rows: Arrays, whole: Arrays, wanted: Sequence[str], results: Sequence[str]) -> Arrays:
        """Return gradients of operands, of constants in float32, for upstream ones of results, which are among the rows.

        Where only rows that count are run: those of the others are zero.
        """
        if not self.counted:
            fn, primals = _function_of(self, rows, whole, tuple(wanted), tuple(results))
            return jax.vjp(fn, primals)[1]({name: rows[name] for name in results})[0]
        axes, keys = varying_of([*rows.values(), *whole.values()]), self._keys(rows, whole)
        # Varying beforehand: else every shard would add up over the devices.
        whole = {name: vary_over(a, axes) for name, a in whole.items()}
        of_rows, of_whole = _rows_and_whole({name: (rows | whole)[name] for name in wanted})
        of_whole = {name: a.astype(wide(a.dtype)) for name, a in of_whole.items()}

        def shard(start: Any, place: jax.Array, sums: Arrays) -> Arrays:
            t, shard_keys = place.shape[0], self._keys_of(keys, start, rows)
            own = {name: rows_of(rows[name], place, t) for name in {*self._names, *results}}

            def fn(moved: Arrays) -> Arrays:
                constants, pieces = self._twins(whole, moved), [moved.get(name, own[name]) for name in self._names]
                found = _numbered(self._shard(constants, t)(shard_keys, pieces))
                return {name: found[name] for name in results}

            _, pull = jax.vjp(fn, {name: own[name] for name in of_rows} | of_whole)
            (d,) = pull({name: own[name] for name in results})
            d = {name: vary_over(a, axes) for name, a in d.items()}
            return {name: with_rows(a, d[name], place) if name in of_rows else a + d[name] for name, a in sums.items()}

        zeros = {name: vary_over(jnp.zeros_like(a), axes) for name, a in (of_rows | of_whole).items()}
        return self._for_each_counted(rows, shard, zeros)

    def _for_each_counted(self, rows: Arrays, shard: Callable[[Any, jax.Array, Any], Any], carry: Any) -> Any:
        """carry = shard(first of its rows in the order of the work, which rows they are, carry) of as many as count."""
        order, count = counted_first(~rows[f"row {self.rows - 1}"])
        plan = self.plans[rows["x"].shape[0]]
        return for_each_of_first(plan, count, lambda i, t, carry: shard(i, rows_of(order, i, t), carry), carry)

    def _keys(self, rows: Arrays, whole: Arrays) -> list[jax.Array]:
        """Return the random keys of this device's shards."""
        count = len(self.plans[rows["x"].shape[0]])
        at = whole["device"] * count if "device" in whole else 0
        own = [lax.dynamic_slice_in_dim(whole[f"key {i}"], at, count) for i in range(len(self.keys))]
        return [_as_key(a, impl) for a, impl in zip(own, self.keys, strict=True)]

    def _keys_of(self, keys: Sequence[jax.Array], start: Any, rows: Arrays) -> list[jax.Array]:
        """Return those of the shard whose first row this is."""
        t = self.plans[rows["x"].shape[0]].shard_tokens
        return [lax.dynamic_index_in_dim(key, start // t, keepdims=False) for key in keys]

    def _twins(self, whole: Arrays, moved: Arrays) -> list[Twins]:
        """Return every constant with what takes its gradient."""
        constants: list[Twins] = []
        for i, impl in enumerate(self.constants):
            name = f"constant {i}"
            a = _as_key(whole[name], impl)
            twin: Any = moved.get(name, a)
            constants.append((twin, twin) if twin.dtype == a.dtype else (a, twin))
        return constants


def _numbered(results: Sequence[jax.Array]) -> Arrays:
    return {f"result {i}": a for i, a in enumerate(results)}


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
            return _rows_and_whole(call.gradients_on_device(rows, whole, wanted, tuple(g)))

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
    split: Split | None,
    found: dict[int, ShardPlan],
    held: Sequence[jax.Array],
    counted: jax.Array | None = None,
) -> list[jax.Array]:
    """run(keys, pieces, held) -> rows of results, of every device's own shards.

    arrays: [*leading dims, ...], x first. keys: for every shard of all devices. found: what `plans` found. held: what run has
    to be given because it cannot close over it. counted: which tokens are run, bool [*leading dims]; results of the others are
    zeros, as their gradients are. None: all.
    """
    lead = arrays[0].ndim - 1
    constants: list[Any] = list(held)
    numbers: dict[int, int] = {}  # of a constant that run closes over, by its id
    at = {}
    lengths = {length for plan in found.values() for length in (plan.shard_tokens, plan.tokens % plan.shard_tokens)}
    for length in sorted(lengths - {0}):
        pieces: Any = [jax.ShapeDtypeStruct((length, *a.shape[lead:]), a.dtype) for a in arrays]
        example = [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in keys], pieces, shapes(held)
        if split is None:  # where a type may say along which axes of a surrounding `shard_map` they vary
            example = [a[0] for a in keys], [a[:length] for a in arrays], held
        traced = _trace(function, run, split, example)
        for a in traced.consts:
            if id(a) not in numbers:
                numbers[id(a)] = len(constants)
                constants.append(a)
        at[length] = traced, tuple(numbers[id(a)] for a in traced.consts)
    of_keys, of_constants = [_numbers(a) for a in keys], [_numbers(jnp.asarray(a)) for a in constants]
    arrays = arrays if counted is None else [*arrays, counted]
    impls, of = tuple(k for _, k in of_keys), tuple(k for _, k in of_constants)
    call = _Traced(split, found, at, len(held), impls, of, len(arrays), counted is not None)
    operands = {"x": arrays[0]} | {f"row {i}": a for i, a in enumerate(arrays) if i}
    operands |= {f"constant {i}": a for i, (a, _) in enumerate(of_constants)}
    operands |= {f"key {i}": a for i, (a, _) in enumerate(of_keys)}
    forms = next(iter(at.values()))[0].out_avals
    fixed = [f"result {i}" for i, form in enumerate(forms) if not jnp.issubdtype(form.dtype, jnp.floating)]
    results = differentiable(_TileRules.forward, _TileRules, without=fixed)(call, operands)
    return [results[f"result {i}"] for i in range(len(forms))]


def _trace(function: str, run: Any, split: Split | None, example: Any) -> Any:
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

    if split is None or split.tokens is None:
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
