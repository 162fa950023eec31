"""`parallelize`: a finished nnx model, a mesh and a configuration become one compiled train step and its shardings."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.config import ParallelConfig
from shared_specs.errors import UnsupportedError, error_text, fail, fail_type
from tiled_jax.functional.loops import vary_over, varying
from tiled_jax.parallel import decoder as decoder  # registers its rules
from tiled_jax.parallel.generic import generic_loss
from tiled_jax.parallel.mapped import Mapped
from tiled_jax.parallel.plan_checks import check_batch, check_model, checked_axes
from tiled_jax.parallel.rules import Path, place, rules_of

HERE = "parallelize"
Loss = Callable[[Any, Any], Any]


class TrainState(NamedTuple):
    """What a train step reads and writes.

    Args:
        parameters: `nnx.State` of nnx.Param. optimizer: optax's state, or () without an optimizer.
    """

    parameters: Any
    optimizer: Any


@dataclass(frozen=True, kw_only=True)
class Parallelized:
    """A model on a mesh.

    Args:
        step: step(state, batch) -> (state, loss), one optimizer update, compiled at its first call. It writes over its
            input state with `config.donate`. None without an optimizer.
        gradients: gradients(parameters, batch) -> (loss, gradients), placed as the parameters are; for gradient
            accumulation and for other optimizers. Donates nothing.
        state: the model's parameters, copied to where they belong, and the optimizer's state; None for a model of
            shapes (`nnx.eval_shape`), whose parameters are loaded by `shardings` and handed to `init`.
        shardings: a `TrainState` of NamedSharding like the state: what Orbax restores by, and what device_put takes.
        shapes: the same of jax.ShapeDtypeStruct, shardings included.
        batch_sharding: of every array of a batch.
        graph: `nnx.merge(graph, state.parameters)` is the model.
        init: init(parameters) -> TrainState: parameters, which may lie anywhere, placed, and a new optimizer state.
    """

    step: Callable[[TrainState, Any], tuple[TrainState, jax.Array]] | None
    gradients: Callable[[Any, Any], tuple[jax.Array, Any]]
    state: TrainState | None
    shardings: TrainState
    shapes: TrainState
    batch_sharding: NamedSharding
    graph: Any
    init: Callable[[Any], TrainState]


def parallelize(
    model: nnx.Module,
    mesh: jax.sharding.Mesh,
    config: ParallelConfig,
    *,
    loss_fn: Loss | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> Parallelized:
    """A compiled train step of the model over the devices of a mesh, and the shardings of all that it works on.

    Every device computes the loss of its own sequences inside one `jax.shard_map`, so that tiled layers and losses loop
    over tokens that are there. Fully-sharded parameters are gathered a layer at a time, in forward and again in backward
    (`reshard`), and their gradients scattered back; replicas (`engine="ddp"`, `replicate_axis`) meet once a step, in a sum
    for each parameter. Which dim of a parameter goes where is said by its sharding metadata or by the rules of the
    model's class (`register_rules`); parameters that neither knows are sharded along the longest dim that divides.

    Args:
        model: nnx, with concrete parameters (which are copied) or of shapes (`nnx.eval_shape`). `tiled_jax.models.Llama`
            has rules for everything below. For other models tensor parallelism is left to XLA and needs
            `TensorParallel(sequence_parallel=False, loss_parallel=False)`, and the unit of gathering is a module in a
            list; the rest is gathered once a step.
        mesh: all of whose axes the configuration names.
        config: see shared_specs.config.ParallelConfig. param_dtype is the dtype in which parameters are gathered and
            modules with a `dtype` compute; the parameters of the state, and the optimizer, keep their own. `reshard`:
            "default" is "always" here, because all layers are one loop.
        loss_fn: loss_fn(model, batch) -> the mean over the sequences of a batch that it is given, or (sum, count), where
            they do not count alike; batch: a pytree of arrays whose dim 0 is the sequence. None: that of the rules
            (`next_token_loss` of [sequences, tokens + 1] for Llama).
        optimizer: an optax transformation; None: the result has `gradients` and no `step`.
    Returns:
        `Parallelized`.
    Numerics: gradients are summed over devices in reduce_dtype and returned in the dtype of the parameters.
    Memory: for each device its part of parameters, gradients and optimizer state, and, of gathered parameters, one layer's.
    Raises:
        SpecError: an axis the mesh does not have, sizes that do not divide, an option that this half has no use for, a
            batch that does not divide (when the step is called). TypeError: a wrong kind of value.
        UnsupportedError: a right value that cannot be done here. All before anything is compiled.
    Source: Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054; Shoeybi et al. 2019, arXiv 1909.08053; the order of the steps is
        torchtitan's.
    Example:
        >>> import numpy as np
        >>> from shared_specs.config import DataParallel
        >>> from tiled_jax import TiledMLP
        >>> mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("dp_shard",))
        >>> plan = parallelize(
        ...     TiledMLP(8, 16, rngs=nnx.Rngs(0)), mesh, ParallelConfig(data=DataParallel()),
        ...     loss_fn=lambda mlp, x: jnp.mean(mlp(x) ** 2), optimizer=optax.sgd(0.1),
        ... )
        >>> state, loss = plan.step(plan.state, jnp.ones((2, 5, 8)))
    """
    if not isinstance(model, nnx.Module):
        fail_type(HERE, "model", "a flax.nnx.Module", type(model).__name__)
    if not isinstance(mesh, jax.sharding.Mesh):
        fail_type(HERE, "mesh", "a jax.sharding.Mesh", type(mesh).__name__)
    rules = rules_of(model)
    axes = checked_axes(config, mesh)
    if loss_fn is None and rules.loss is None:
        fail(HERE, "loss_fn", "given for a model without a loss of its own", None, advice="Or register rules with one.")
    loss = None if loss_fn is not None else rules.loss
    check_model(model, mesh, config, axes, rules if loss is not None else None)
    graph, parameters = _split(model)
    placements = {
        path: place(HERE, path, leaf.get_value().shape, _metadata(leaf), rules, axes)
        for path, leaf in nnx.to_flat_state(parameters)
    }
    data = config.data
    mapped = Mapped(
        axes=axes,
        config=config,
        placements=placements,
        param_dtype=None if data is None else data.param_dtype,
        reduce_dtype=None if data is None else data.reduce_dtype,
        cast_vectors=loss is None,
    )
    build = _Build(mesh, mapped, _computing_in(graph, parameters, mapped.param_dtype), loss, loss_fn, optimizer)
    return build.run(graph, parameters)


def _split(model: nnx.Module) -> tuple[Any, Any]:
    """Graph and parameters; other variables would need rules for what devices write into them."""
    graph, parameters, other = nnx.split(model, nnx.Param, ...)
    found = nnx.to_flat_state(other)
    if found:
        path, variable = next(iter(found))
        advice = "Replace random streams and statistics by arguments, or call jax.shard_map yourself."
        kind = f"{'.'.join(map(str, path))} ({type(variable).__name__})"
        raise UnsupportedError(error_text(HERE, "model", "without variables beside nnx.Param", kind, advice=advice))
    return graph, parameters


def _metadata(leaf: nnx.Variable) -> Any:
    """The axes of a parameter's dims in its own sharding metadata."""
    found = leaf.get_metadata()
    return next((found[name] for name in ("out_sharding", "sharding_names", "sharding") if found.get(name)), None)


def _computing_in(graph: Any, parameters: Any, dtype: str | None) -> Any:
    """The graph with the modules that have a `dtype` of the computation computing in this one."""
    if dtype is None:
        return graph
    model = nnx.merge(graph, parameters)
    for _, module in nnx.iter_modules(model):
        if getattr(module, "dtype", None) is not None:
            module.dtype = jnp.dtype(dtype)
    return nnx.graphdef(model)


@dataclass(frozen=True)
class _Build:
    """The compiled functions of one call of `parallelize`."""

    mesh: jax.sharding.Mesh
    mapped: Mapped
    graph: Any  # computing in param_dtype
    loss: Callable[..., tuple[Any, Any]] | None
    loss_fn: Loss | None
    optimizer: optax.GradientTransformation | None

    def run(self, graph: Any, parameters: Any) -> Parallelized:
        shapes = self._shapes(parameters)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
        gradients = jax.jit(self._gradients, out_shardings=(self._named(P()), shardings.parameters))
        init = partial(self._init, shardings)
        concrete = not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(parameters))
        return Parallelized(
            step=None if self.optimizer is None else self._checked(self._step(shardings)),
            gradients=self._checked(gradients),
            state=init(parameters) if concrete else None,
            shardings=shardings,
            shapes=shapes,
            batch_sharding=self._named(P(self.mapped.axes.batch or None)),
            graph=graph,
            init=init,
        )

    def _named(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def _spec(self, path: Path, ndim: int, *, manual: bool = False) -> P:
        """Of a parameter; `manual`: of the axes that shard_map maps over."""
        tensor = not manual or self.loss is not None
        return P(*self.mapped.placements[path].spec(ndim, self.mapped.axes, tensor=tensor))

    def _shapes(self, parameters: Any) -> TrainState:
        """Shape, dtype and sharding of every array of the state."""

        def of(path: Path, leaf: Any) -> Any:
            value = leaf.get_value()
            sharding = self._named(self._spec(path, len(value.shape)))
            return leaf.replace(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding))

        shapes = nnx.from_flat_state([(path, of(path, leaf)) for path, leaf in nnx.to_flat_state(parameters)])
        if self.optimizer is None:
            return TrainState(shapes, ())
        whole = self._named(P())
        state = optax.tree.map_params(
            self.optimizer,
            lambda moment, like: jax.ShapeDtypeStruct(moment.shape, moment.dtype, sharding=like.sharding),
            jax.eval_shape(self.optimizer.init, shapes),
            shapes,
            transform_non_params=lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole),
        )
        return TrainState(shapes, state)

    def _init(self, shardings: TrainState, parameters: Any) -> TrainState:
        placed = jax.tree.map(_copied, parameters, shardings.parameters)
        if self.optimizer is None:
            return TrainState(placed, ())
        return TrainState(placed, jax.jit(self.optimizer.init, out_shardings=shardings.optimizer)(placed))

    def _gradients(self, parameters: Any, batch: Any) -> tuple[jax.Array, Any]:
        axes = self.mapped.axes
        flat = nnx.to_flat_state(parameters)
        specs = nnx.from_flat_state(
            [(path, leaf.replace(self._spec(path, leaf.get_value().ndim, manual=True))) for path, leaf in flat]
        )
        manual = set(self.mesh.axis_names) - (set() if self.loss is not None or not axes.tensor else {axes.tensor})
        if not manual:
            return jax.value_and_grad(lambda p: self._total(p, batch))(parameters)
        return jax.shard_map(
            lambda parameters, batch: jax.value_and_grad(lambda p: self._total(p, batch))(parameters),
            mesh=self.mesh,
            in_specs=(specs, P(axes.batch or None)),
            out_specs=(P(), specs),
            axis_names=manual,
        )(parameters, batch)

    def _total(self, parameters: Any, batch: Any) -> jax.Array:
        """The loss of the whole batch, the same on all devices."""
        parameters = self.mapped.shared(parameters)
        if self.loss is not None:
            total, count = self.loss(nnx.merge(self.graph, parameters), batch, self.mapped)
        else:
            assert self.loss_fn is not None
            total, count = generic_loss(self.graph, parameters, batch, self.loss_fn, self.mapped)
        count = jnp.asarray(count).astype(total.dtype)
        over = tuple(sorted(varying(total) | varying(count)))
        if not over:
            return total / count
        return lax.psum(vary_over(total, over), over) / lax.psum(vary_over(count, over), over)

    def _step(self, shardings: TrainState) -> Any:
        optimizer = self.optimizer
        assert optimizer is not None

        def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
            loss, gradients = self._gradients(state.parameters, batch)
            # optax raises a float to the power of an integer count, which strict promotion refuses.
            with jax.numpy_dtype_promotion("standard"):
                updates, new = optimizer.update(gradients, state.optimizer, state.parameters)
            return TrainState(optax.apply_updates(state.parameters, updates), new), loss

        donated = (0,) if self.mapped.config.donate else ()
        return jax.jit(step, donate_argnums=donated, out_shardings=(shardings, self._named(P())))

    def _checked(self, compiled: Any) -> Any:
        """The function, which refuses a batch that does not divide before it is traced, and deals it out."""
        return _Checked(compiled, self.mapped, self._named(P(self.mapped.axes.batch or None)))


@dataclass(frozen=True)
class _Checked:
    """A compiled function of (state, batch). `lower` is jax.jit's."""

    compiled: Any
    mapped: Mapped
    batch_sharding: NamedSharding

    def __call__(self, state: Any, batch: Any) -> Any:
        return self.compiled(state, self._dealt(batch))

    def lower(self, state: Any, batch: Any) -> Any:
        return self.compiled.lower(state, self._dealt(batch))

    def _dealt(self, batch: Any) -> Any:
        """The batch at its place; of a jax.ShapeDtypeStruct, one with the sharding."""
        check_batch(batch, self.mapped.axes)
        place = self.batch_sharding

        def dealt(leaf: Any) -> Any:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
            return leaf if getattr(leaf, "sharding", None) == place else jax.device_put(leaf, place)

        return jax.tree.map(dealt, batch)


def _copied(value: Any, sharding: NamedSharding) -> jax.Array:
    """A copy at its place: donating the state leaves the arrays it was made from alone."""
    if isinstance(value, jax.Array):
        # device_put gives back the same buffer where it is in place already, whatever may_alias says.
        return jax.device_put(jnp.copy(value), sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: np.array(value[index]))
