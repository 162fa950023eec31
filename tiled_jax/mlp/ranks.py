"""The tiled MLP with its columns, and perhaps its tokens, split over a mesh axis: as a function and as an nnx module."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.collectives.agreement import sequence_tokens
from shared_specs.collectives.partitions import even_range
from shared_specs.config import Tiling
from shared_specs.core import checks
from tiled_jax.collectives.gathered_tokens import axis_ranks
from tiled_jax.collectives.mesh import check_mesh, place, split_as, token_spec
from tiled_jax.collectives.padding import is_token, without_padding
from tiled_jax.core.params import as_operands, compute_dtype
from tiled_jax.core.products import refuse_exchanged_products
from tiled_jax.mlp.api import check_operands, make_call
from tiled_jax.mlp.autodiff import run
from tiled_jax.mlp.params import MLPConfig, make_config, param_axes, param_shapes
from tiled_jax.tile.module_state import check_module_rngs

_NAME = "tensor_parallel_mlp"

_init_weight, _init_bias = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()


def tensor_parallel_mlp(
    x: jax.Array,
    w_gate: jax.Array | None,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    biases: Mapping[str, jax.Array] | None = None,
    activation: str = "silu",
    sequence_parallel: bool = False,
    split_sizes: Sequence[int] | None = None,
    num_shards: int | None = None,
    keep: float = 0.0,
    tiling: Tiling | None = None,
    backend: str = "auto",
    axis_name: str,
) -> jax.Array:
    """`tiled_mlp` with the intermediate columns, and with sequence_parallel the tokens, split over the devices of a mesh axis.

    y = Σ over devices of (act(x w_gate) * (x w_up)) w_down. With sequence_parallel no device ever holds x, y or their
    gradients for more tokens than two gathered shards, 2 R t H elements. Shard i of every device's own tokens is gathered
    while shard i - 1 computes. Every device then receives its own rows of the sum.

    Args:
        x: this device's tokens, [T / R, H] or with any leading dims; without sequence_parallel [T, H], the same on all
            devices of the axis. Dtypes as in `tiled_mlp`.
        w_gate, w_up: [H, I / R]; w_gate None for a plain MLP. w_down: [I / R, H_out].
        biases: any of gate, up [I / R], down [H_out]; down is the same on all devices and is added once.
        activation, keep, tiling, backend: as in `tiled_mlp`.
        sequence_parallel: the tokens of both x and y are split over the axis.
        split_sizes: the number of tokens of every device, if they differ. x has the same number of rows on every device (all
            leading dims flattened). A device's tokens are the first rows, and y is zero in the rows after them.
        num_shards: the maximum number of shards of the device's own tokens; a gathered shard has R times as many tokens.
        axis_name: the axis of the surrounding `jax.shard_map`. Other axes may split tokens further.
    Returns:
        [same leading dims, H_out], dtype of x; the same on all devices without sequence_parallel.
    Numerics: as `tiled_mlp`; a device's part of y and of dx is rounded to the dtype of x before the sum over devices.
    Memory: as `tiled_mlp` of R t tokens and I / R columns, and the gathered shards
        (shared_specs.mlp.sequence_costs.compiled_sequence_peak_bytes).
    Raises:
        As `tiled_mlp`; SpecError where axis_name is no axis of a surrounding `jax.shard_map`.
    Source: derived in shared_specs/README.md; the split is Megatron-LM's, arXiv 1909.08053 and 2205.05198, which gathers all
        tokens at once. Products that hide the steps of a ring: Wang et al., ASPLOS 2023.
    Example:
        y = jax.shard_map(
            partial(tensor_parallel_mlp, sequence_parallel=True, axis_name="tp"), mesh=mesh,
            in_specs=(P("tp", None), P(None, "tp"), P(None, "tp"), P("tp", None)), out_specs=P("tp", None),
        )(x, w_gate, w_up, w_down)
    """
    refuse_exchanged_products(_NAME, {"w_gate": w_gate, "w_up": w_up, "w_down": w_down})
    ranks = axis_ranks(_NAME, axis_name)
    given = check_operands(_NAME, x, w_gate, w_up, w_down, biases, activation, num_shards, keep, tiling, backend)
    rows = checks.flat_tokens(given.x.shape)
    sizes = sequence_tokens(
        _NAME, sequence_parallel, split_sizes, tokens=rows, ranks=ranks, rank=None, x=tuple(given.x.shape)
    )
    call = make_call(given, backend, None if sizes is None else axis_name)
    x, w = given.rows(call), given.weights
    if sizes is None:
        if "b_down" in w:  # on the first of the devices whose results are summed
            w["b_down"] = jnp.where(lax.axis_index(axis_name) == 0, w["b_down"], 0)
        y = lax.psum(run(call, x, w), axis_name)
    else:
        tokens = is_token(sizes, rows, axis_name)
        y = without_padding(run(call, without_padding(x, tokens), w), tokens)
    return y.reshape(*given.x.shape[:-1], y.shape[-1])


class TensorParallelTiledMLP(nnx.Module):
    """`TiledMLP` with its weights split over an axis of a mesh, called with global arrays inside or outside of `jax.jit`.

    Args:
        hidden_size, intermediate_size: H and I. The number of devices of the axis must divide I.
        activation, gated, bias: as in `TiledMLP`.
        sequence_parallel: x and y are split by tokens over the axis (the last dim of tokens: [B, S, H] by S) instead of
            replicated along it. See `tensor_parallel_mlp`.
        num_shards, keep, tiling, backend: as in `tensor_parallel_mlp`.
        mesh: a `jax.sharding.Mesh`, of Auto or Explicit axes. axis_name: the mesh axis that splits the weights. dtype,
        param_dtype, rngs: as in `TiledMLP`; weights are the same whatever the number of devices.
    The other axes of the mesh hold copies of the weights and split the first dim of x; Explicit axes split it as in x.
    Parameters are global arrays: `w_gate`, `w_up` [H, I] split by column, `w_down` [I, H] by row, and with bias `b_gate`,
    `b_up` [I], `b_down` [H].
    Raises:
        SpecError, TypeError, UnsupportedError: as `tensor_parallel_mlp` and `TiledMLP`; SpecError where I, or the tokens of a
        call, cannot be split evenly.
    Source: derived in shared_specs/README.md.
    Example:
        mesh = jax.make_mesh((2, 4), ("data", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        mlp = TensorParallelTiledMLP(4096, 14336, sequence_parallel=True, mesh=mesh, rngs=nnx.Rngs(0))
        y = jax.jit(lambda mlp, x: mlp(x))(mlp, x)
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        sequence_parallel: bool = False,
        num_shards: int | None = None,
        keep: float = 0.0,
        tiling: Tiling | None = None,
        backend: str = "auto",
        mesh: jax.sharding.Mesh,
        axis_name: str = "tp",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        name = type(self).__name__
        check_module_rngs(name, rngs)
        shapes = param_shapes(name, hidden_size, intermediate_size, gated=gated, bias=bias, fused_gate_up=False)
        self.config = make_config(activation, gated, False, num_shards, keep, tiling, backend, function=name)
        even_range(name, "intermediate_size", intermediate_size, check_mesh(name, mesh, axis_name), 0)
        sequence_tokens(name, sequence_parallel, None, tokens=0, ranks=1, rank=None, x=())
        self.sequence_parallel, self.mesh, self.axis_name, self.dtype = sequence_parallel, mesh, axis_name, dtype
        axes = param_axes((None, axis_name), fused_gate_up=False)
        for key, shape in shapes.items():
            init = _init_weight if key.startswith("w_") else _init_bias
            sharding = NamedSharding(mesh, P(*axes(key) or ()))
            setattr(self, key, nnx.Param(place(init, sharding, rngs.params(), shape, param_dtype)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., H] -> [..., H], split as x is."""
        params = self.config.held(type(self).__name__, self)
        spec = token_spec(type(self).__name__, x, self.mesh, self.axis_name, split_tokens=self.sequence_parallel)
        axes = param_axes((None, self.axis_name), fused_gate_up=False)
        specs = {name: P(*axes(name) or ()) for name in params}
        dtype = compute_dtype(x, params, self.dtype)
        mapped_call = partial(on_device, self.config, self.sequence_parallel, self.axis_name)
        mapped = jax.shard_map(mapped_call, mesh=self.mesh, in_specs=(spec, specs), out_specs=spec)
        return mapped(split_as(x.astype(dtype), self.mesh, spec), as_operands(params, dtype))


def on_device(
    config: MLPConfig, sequence_parallel: bool, axis_name: str, x: jax.Array, params: Mapping[str, jax.Array]
) -> jax.Array:
    """`tensor_parallel_mlp` with the options of a module and a device's parts of its parameters, by their names."""
    return tensor_parallel_mlp(**config.operands(x, params), sequence_parallel=sequence_parallel, axis_name=axis_name)
