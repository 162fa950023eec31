"""Who multiplies the rows of one shard with the weights of their experts: a loop over blocks of rows, or `lax.ragged_dot`.

XLA knows a ragged product as one operation on a TPU, and JAX has a kernel for it on a GPU where
`jax_ragged_dot_use_gpu_pallas_triton_lowering` asks for it. Elsewhere, on a CPU and on an NVIDIA GPU, XLA takes every row times
every expert's weights, E times the products and the memory: there a loop takes a block of one expert's rows at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from shared_specs.moe.costs import rows_of_a_block
from tiled_jax.core.products import product, product_of_rows
from tiled_jax.core.turns import turns
from tiled_jax.moe.routes import Routes

Carry = TypeVar("Carry")


class Products(Protocol):
    """The products of some rows [r, ...], each with the weights [E, ...] of its expert."""

    def product(self, rows: jax.Array, w: jax.Array, dim: int, out: jnp.dtype) -> jax.Array:
        """Sum over the last dim of rows and `dim` of each expert's matrix, 0 or 1, in `out`."""
        ...

    def added(self, total: jax.Array, rows: jax.Array, d: jax.Array) -> jax.Array:
        """Return total [E, ...] + rows^T d of each expert."""
        ...


RowsBody = Callable[[jax.Array, jax.Array, Products, Carry], Carry]


class OneExpert(NamedTuple):
    """Of rows that are all of one expert, whose number is known when the program runs."""

    expert: jax.Array

    def product(self, rows: jax.Array, w: jax.Array, dim: int, out: jnp.dtype) -> jax.Array:
        return product(rows, w[self.expert], (1, dim), out)

    def added(self, total: jax.Array, rows: jax.Array, d: jax.Array) -> jax.Array:
        return total.at[self.expert].set(total[self.expert] + product_of_rows(rows, d, total.dtype))


class EveryExpert(NamedTuple):
    """Of rows that lie in the order of the experts. sizes: how many each one has."""

    sizes: jax.Array

    def product(self, rows: jax.Array, w: jax.Array, dim: int, out: jnp.dtype) -> jax.Array:
        return self._general(rows, w, (((1,), (1 + dim,)), ((), ())), (0,), out)

    def added(self, total: jax.Array, rows: jax.Array, d: jax.Array) -> jax.Array:
        return total + self._general(rows, d, (((0,), (0,)), ((), ())), (), total.dtype)

    def _general(self, a: jax.Array, b: jax.Array, dims: Any, groups: tuple[int, ...], out: jnp.dtype) -> jax.Array:
        numbers = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=dims, lhs_ragged_dimensions=(0,), rhs_group_dimensions=groups
        )
        precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
        options: dict[str, Any] = {"precision": precision, "preferred_element_type": out}
        return lax.ragged_dot_general(a, b, self.sizes, numbers, **options)


@dataclass(frozen=True)
class BlockSteps:
    """A block of one expert's rows at a time, as many as are filled: an expert without tokens has none. Static."""

    name: ClassVar[str] = "blocks"

    def rows(self, pairs: int, experts: int) -> int:
        return rows_of_a_block(pairs, experts)

    def each(self, routes: Routes, body: RowsBody[Carry], carry: Carry) -> Carry:
        """Return the carry after body(pairs, tokens, products, carry) of all rows."""
        blocks = routes.experts.shape[0]
        rows = routes.pairs.shape[0] // blocks
        cut = partial(lax.dynamic_slice_in_dim, slice_size=rows)

        def block(j: Any, carry: Carry) -> Carry:
            start = j * rows
            found = cut(routes.pairs, start), cut(routes.tokens, start)
            return body(*found, OneExpert(routes.experts[j]), carry)

        return turns(block, routes.blocks, blocks, carry)


@dataclass(frozen=True)
class RaggedSteps:
    """All rows of a shard at once, by `lax.ragged_dot_general`. Static."""

    name: ClassVar[str] = "ragged"

    def rows(self, pairs: int, experts: int) -> int:
        return 1

    def each(self, routes: Routes, body: RowsBody[Carry], carry: Carry) -> Carry:
        return body(routes.pairs, routes.tokens, EveryExpert(routes.sizes), carry)


Steps = BlockSteps | RaggedSteps


def steps_here() -> Steps:
    """Return who multiplies on the devices of this process."""
    platform = jax.default_backend()
    kernel = getattr(jax.config, "jax_ragged_dot_use_gpu_pallas_triton_lowering", False)
    return RaggedSteps() if platform == "tpu" or (platform == "gpu" and kernel) else BlockSteps()
