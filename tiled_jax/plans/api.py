"""`parallelize`: a finished nnx model, a mesh and a configuration become one compiled train step and its shardings."""

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.config import ParallelConfig
from shared_specs.errors import fail, fail_type
from shared_specs.plans.applied import applied_lines
from tiled_jax.core.products import wide
from tiled_jax.linear.module import TiledLinear
from tiled_jax.loss.module import TiledLinearCrossEntropy
from tiled_jax.mlp.module import TiledMLP
from tiled_jax.models import Llama
from tiled_jax.models.experts import ExpertsMLP
from tiled_jax.moe.module import TiledMoE
from tiled_jax.plans import decoder as decoder  # registers its rules
from tiled_jax.plans.accumulation import accumulated, mean_over_devices
from tiled_jax.plans.any_model import generic_loss
from tiled_jax.plans.checks import check_batch, check_micro_batches, check_model, check_split, checked_axes
from tiled_jax.plans.data import Mapped
from tiled_jax.plans.registry import Path, as_parameters, placement_of, rules_of
from tiled_jax.plans.variables import (
    agree_on_state,
    filter_of,
    is_state,
    joined,
    of_rank,
    parted,
    same_keys,
    split_model,
    trained_paths,
)

_LOG = logging.getLogger("tiled_jax")
HERE = "parallelize"
Loss = Callable[[Any, Any], Any]


class TrainState(NamedTuple):
    """The state that a train step reads and writes.

    Args:
        parameters: `nnx.State` of nnx.Param, trained or not. optimizer: optax's state of the trained parameters, or () without
            an optimizer.
        variables: `nnx.State` of everything else in the model, often empty.
    """

    parameters: Any
    optimizer: Any
    variables: Any


@dataclass(frozen=True, kw_only=True)
class Parallelized:
    """A model on a mesh.

    Args:
        step: step(state, batch) -> (state, loss), one optimizer update, compiled at its first call. It writes over its
            input state with `config.donate`. None without an optimizer.
        gradients: gradients(parameters, batch) -> (loss, gradients), of the trained parameters and with their placement. Use
            it for gradient accumulation and for other optimizers. It donates nothing. A model with other variables has
            gradients(parameters, batch, variables) -> (loss, gradients, variables).
        loss: loss(parameters, batch) -> only the loss, without a gradient. It ignores micro_batches. The number of devices must
            divide the sequences of the batch. A model with other variables has loss(parameters, batch, variables), which does
            not change the variables.
        state: the model's parameters and variables, placed on the devices, and the optimizer's state. None for a model of
            shapes (`nnx.eval_shape`): load its parameters by `shardings` and pass them to `init`.
        shardings: a `TrainState` of NamedSharding with the structure of the state, for Orbax's restore and for device_put.
        shapes: the same structure with jax.ShapeDtypeStruct, shardings included.
        batch_sharding: the sharding of every array of a batch.
        graph: `nnx.merge(graph, state.parameters, state.variables)` is the model.
        init: init(parameters) -> TrainState. It places the parameters, which may be on any device, and creates a new optimizer
            state. Use init(parameters, variables) to replace the model's own variables.
    """

    step: Callable[[TrainState, Any], tuple[TrainState, jax.Array]] | None
    gradients: Callable[..., tuple[Any, ...]]
    loss: Callable[..., jax.Array]
    state: TrainState | None
    shardings: TrainState
    shapes: TrainState
    batch_sharding: NamedSharding
    graph: Any
    init: Callable[..., TrainState]


def parallelize(
    model: nnx.Module,
    mesh: jax.sharding.Mesh,
    config: ParallelConfig,
    *,
    loss_fn: Loss | None = None,
    optimizer: optax.GradientTransformation | None = None,
    wrt: Any = nnx.Param,
) -> Parallelized:
    """Return a compiled train step of the model over the devices of a mesh, and the shardings of its arrays.

    Every device computes the loss of its own sequences inside one `jax.shard_map`, so tiled layers and losses loop over local
    tokens. Devices of a `context_axis` get whole sequences. Each computes with its own tokens, except in attention. `context`
    selects `context_attention`, `ring_attention`, or one inside the other. Fully-sharded parameters are gathered one layer at a
    time, in forward and again in backward (`reshard`), and their gradients are scattered back. Replicas (`engine="ddp"`,
    `replicate_axis`) communicate once per step, in one sum for each parameter. A parameter's sharding metadata, or the rules of
    the model's class (`register_rules`), determine how its dims are split. If neither covers a parameter, it is sharded along
    the longest dim that divides. The logger "tiled_jax" writes one INFO line for each applied step, in the first process.

    Args:
        model: an nnx model with concrete parameters (which are copied) or with shapes (`nnx.eval_shape`). It keeps its current
            mode (`train()`, `eval()`). `tiled_jax.models.Llama` has rules for everything below. For other models tensor
            parallelism is left to XLA and needs `TensorParallel(sequence_parallel=False, loss_parallel=False)`. Their unit of
            gathering is the call of a module in a list, or of a tiled one that is made of a list; the rest is gathered once per
            step. Variables that are no nnx.Param are carried along, in a Llama only random keys and statistics: data ranks fold
            their rank into random keys (nnx.Dropout), and floating-point statistics that differ between devices are averaged
            afterwards. A Llama with such variables is refused.
        mesh: the configuration must name all of its axes.
        config: see shared_specs.config.ParallelConfig. Parameters are gathered in param_dtype. Modules with a `dtype`
            compute in it, and loss_fn gets the floating-point arrays of a batch in it. The parameters of the state, and the
            optimizer, keep their own dtype. `reshard`: "default" is "always" here, because all layers are one loop.
            cpu_offload is refused, because a compiled step reads its parameters from the devices' memory.
        loss_fn: loss_fn(model, batch) -> the mean over the sequences of a batch that it is given, or (sum, count), where
            they do not count alike; batch: a pytree of arrays whose dim 0 is the sequence. None: that of the rules
            (`next_token_loss` for Llama, of an array of tokens or a mapping, of packed documents too).
        optimizer: an optax transformation; None: the result has `gradients` and no `step`.
        wrt: a filter of the trained parameters, as in `nnx.Optimizer`: a type of variable (nnx.LoRAParam), a predicate of path
            and variable, or `nnx.All(nnx.Param, nnx.PathContains("mlp"))`. The other parameters are placed and gathered in the
            same way, and have neither gradients nor optimizer state. A variable that wrt selects is a parameter, whatever its
            type.
    Returns:
        `Parallelized`.
    Numerics: gradients are summed over devices in reduce_dtype and returned in the dtype of the parameters, those of
        micro-batches (`config.micro_batches`) before that in float32. Losses of devices are summed, and returned, in float32
        (float64 for float64). The loss is one sum over one count, of all devices and micro-batches.
    Memory: for each device its part of parameters, gradients and optimizer state, and, of gathered parameters, one layer's.
        Llama's table is never gathered without tensor parallelism, nor its head where the devices have few tokens: 2 R T
        <= V (1 + r), of R devices of one shard axis with T tokens each, r the bytes of reduce_dtype over those of
        param_dtype, all but `reshard="never"`. A vocabulary that the tensor axis does not divide is whole on each of its
        devices.
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
    held = nnx.Any(nnx.Param, filter_of(wrt)) if loss is None else nnx.Not(is_state)
    graph, parameters, variables = split_model(model, held)
    trained = trained_paths(parameters, wrt)
    placements = {
        path: placement_of(HERE, path, leaf.get_value().shape, _metadata(leaf), rules, axes)
        for path, leaf in nnx.to_flat_state(parameters)
    }
    check_split(mesh, config, placements.values(), (a.dtype for a in jax.tree.leaves(parameters)), own=loss is not None)
    data = config.data
    mapped = Mapped(
        axes=axes,
        config=config,
        placements=placements,
        param_dtype=None if data is None else data.param_dtype,
        reduce_dtype=None if data is None else data.reduce_dtype,
        cast_vectors=loss is None,
        held=held,
    )
    computing = _computing_in(model, mapped.param_dtype)
    built = _Build(mesh, mapped, computing, loss, loss_fn, optimizer, trained).run(graph, parameters, variables)
    if jax.process_index() == 0:
        if len(trained) < len(placements):
            _LOG.info("%s: wrt trains %d of %d parameters", HERE, len(trained), len(placements))
        for line in applied_lines(config, axes.size, _tiled_in(model, own=loss is not None)):
            _LOG.info("%s: %s", HERE, line)
    return built


def _tiled_in(model: nnx.Module, *, own: bool) -> Counter[str]:
    """Return how modules are tiled -> how many are, layers of a stack one by one; `own`: with the loss of the model's rules."""
    found: Counter[str] = Counter()
    blocks = isinstance(model, Llama) and model.scope == "block"
    weights: Any
    for _, module in nnx.iter_modules(model):
        if isinstance(module, TiledMLP):
            path = "tiled_block" if blocks else module._path().partition(":")[0]
            found[path] += math.prod(_matrix_of(module)[:-2])
        elif isinstance(module, ExpertsMLP) and not module.plain:
            weights = module
            found["tiled_block" if blocks else "tiled_experts"] += len(weights.w_down.get_value())
        elif isinstance(module, TiledMoE):
            found["tiled_moe"] += 1
        elif isinstance(module, TiledLinearCrossEntropy):
            found["tiled_linear_cross_entropy"] += 1
        elif isinstance(module, TiledLinear):
            found["TiledLinear"] += 1
    if own and isinstance(model, Llama) and not model.plain:
        found["tiled_linear_cross_entropy"] += 1
    return found


def _matrix_of(mlp: nnx.Module) -> tuple[int, ...]:
    """Return the shape of a weight of an MLP, or of a stack of MLPs; of one whose projections are layers a kernel's."""
    weights = (leaf for path, leaf in nnx.to_flat_state(nnx.state(mlp)) if str(path[-1]).startswith(("w_", "kernel")))
    leaf = next(weights, None)
    return () if leaf is None else leaf.get_value().shape


def _metadata(leaf: nnx.Variable) -> Any:
    """Return the axes of a parameter's dims in its own sharding metadata."""
    found = leaf.get_metadata()
    return next((found[name] for name in ("out_sharding", "sharding_names", "sharding") if found.get(name)), None)


def _computing_in(model: nnx.Module, dtype: str | None) -> Any:
    """Return the model's graph, with the modules that have a `dtype` of the computation computing in this one."""
    if dtype is None:
        return nnx.graphdef(model)
    model = nnx.merge(*nnx.split(model))  # whose attributes are its own
    module: Any
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
    trained: frozenset[Path]

    def run(self, graph: Any, parameters: Any, variables: Any) -> Parallelized:
        shapes = self._shapes(parameters, variables)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
        concrete = not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((parameters, variables)))
        init = partial(self._init, shardings, variables)
        return Parallelized(
            step=None if self.optimizer is None else self._checked(self._step(shardings)),
            gradients=self._checked(self._public_gradients(shardings)),
            loss=replace(self, mapped=self.mapped.in_one_piece())._public_loss(shardings),
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
        """Return the spec of a parameter; `manual`: of the axes that shard_map maps over."""
        tensor = not manual or self.loss is not None
        return P(*self.mapped.placements[path].spec(ndim, self.mapped.axes, tensor=tensor))

    def _shapes(self, parameters: Any, variables: Any) -> TrainState:
        """Return the shape, dtype and sharding of every array of the state."""

        def of(path: Path, leaf: Any) -> Any:
            value = leaf.get_value()
            sharding = self._named(self._spec(path, len(value.shape)))
            return leaf.replace(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding))

        shapes = nnx.from_flat_state([(path, of(path, leaf)) for path, leaf in nnx.to_flat_state(parameters)])
        whole = self._named(P())
        variables = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), variables)
        if self.optimizer is None:
            return TrainState(shapes, (), variables)
        trained = parted(shapes, self.trained)[0]
        state = jax.eval_shape(self.optimizer.init, trained)
        return TrainState(shapes, as_parameters(state, trained, whole), variables)

    def _init(self, shardings: TrainState, own: Any, parameters: Any, variables: Any = None) -> TrainState:
        """own: the variables that the model came with."""
        variables = own if variables is None else variables
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(variables)):
            fail(f"{HERE}: init", "variables", "given for a model of shapes with variables beside its parameters", None)
        placed = jax.tree.map(_copied, parameters, shardings.parameters)
        variables = jax.tree.map(_copied, variables, shardings.variables)
        if self.optimizer is None:
            return TrainState(placed, (), variables)
        trained = parted(placed, self.trained)[0]
        return TrainState(placed, jax.jit(self.optimizer.init, out_shardings=shardings.optimizer)(trained), variables)

    def _public_gradients(self, shardings: TrainState) -> Any:
        placed = self._named(P()), parted(shardings.parameters, self.trained)[0]
        if jax.tree.leaves(shardings.variables):
            return jax.jit(self._gradients, out_shardings=(*placed, shardings.variables))

        def gradients(parameters: Any, batch: Any) -> tuple[jax.Array, Any]:
            return self._gradients(parameters, batch, shardings.variables)[:2]  # of nothing

        return jax.jit(gradients, out_shardings=placed)

    def _public_loss(self, shardings: TrainState) -> Any:
        def loss(parameters: Any, batch: Any, variables: Any) -> jax.Array:
            return self._mapped(self._loss_on_device, parameters, batch, variables)

        def loss_alone(parameters: Any, batch: Any) -> jax.Array:
            return loss(parameters, batch, shardings.variables)  # of nothing

        with_variables = bool(jax.tree.leaves(shardings.variables))
        return self._checked(jax.jit(loss if with_variables else loss_alone, out_shardings=self._named(P())))

    def _gradients(self, parameters: Any, batch: Any, variables: Any) -> tuple[jax.Array, Any, Any]:
        return self._mapped(self._on_device, parameters, batch, variables)

    def _mapped(self, function: Any, parameters: Any, batch: Any, variables: Any) -> Any:
        """Return what a function of one device's share of these makes of them, put together."""
        axes = self.mapped.axes
        flat = nnx.to_flat_state(parameters)
        specs = nnx.from_flat_state(
            [(path, leaf.replace(self._spec(path, leaf.get_value().ndim, manual=True))) for path, leaf in flat]
        )
        manual = set(self.mesh.axis_names) - (set() if self.loss is not None or not axes.tensor else {axes.tensor})
        whole = jax.tree.map(lambda _: P(), variables)
        if not manual:
            return function(parameters, batch, variables)
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(specs, P(axes.batch or None), whole),
            out_specs=P() if function == self._loss_on_device else (P(), parted(specs, self.trained)[0], whole),
            axis_names=manual,
        )(parameters, batch, variables)

    def _loss_on_device(self, parameters: Any, batch: Any, variables: Any) -> jax.Array:
        axes = tuple(axis for axis in self.mapped.axes.data if self.mapped.axes.size[axis] > 1)
        return self._total(parameters, batch, of_rank(variables, axes))[0]

    def _on_device(self, parameters: Any, batch: Any, variables: Any) -> tuple[jax.Array, Any, Any]:
        """Loss, gradients and variables as `shard_map` puts them together."""
        axes = tuple(axis for axis in self.mapped.axes.data if self.mapped.axes.size[axis] > 1)
        own = of_rank(variables, axes)
        parts = self.mapped.config.micro_batches
        trained, frozen = parted(parameters, self.trained)
        if parts > 1:
            still = self.mapped.shared(frozen)

            def sums(given: Any, batch: Any, variables: Any) -> tuple[jax.Array, jax.Array, Any]:
                return self._sums(joined(given, still), batch, variables)

            loss, gradients, after = accumulated(sums, self.mapped.shared, trained, batch, own, parts)
        else:
            total = jax.value_and_grad(lambda trained: self._total(joined(trained, frozen), batch, own), has_aux=True)
            (loss, after), gradients = total(trained)
        return loss, gradients, agree_on_state(variables, after)

    def _total(self, parameters: Any, batch: Any, variables: Any) -> tuple[jax.Array, Any]:
        """Return the loss of the whole batch, the same on all devices, and the variables after it, this device's."""
        total, count, after = self._sums(self.mapped.shared(parameters), batch, variables)
        return mean_over_devices(total, count), after

    def _sums(self, parameters: Any, batch: Any, variables: Any) -> tuple[jax.Array, jax.Array, Any]:
        """Return sum and count of this device's share, and the variables after it; parameters: of `Mapped.shared`."""
        if self.loss is not None:
            model = nnx.merge(self.graph, parameters, variables, copy=True)
            total, count = self.loss(model, batch, self.mapped)
            after = same_keys(variables, split_model(model, self.mapped.held)[2])
        else:
            assert self.loss_fn is not None
            total, count, after = generic_loss(self.graph, parameters, variables, batch, self.loss_fn, self.mapped)
        # A 16-bit loss_fn's sums and counts would be rounded to three digits between devices.
        total = jnp.asarray(total)
        total = total.astype(wide(total.dtype))
        return total, jnp.asarray(count).astype(total.dtype), after

    def _step(self, shardings: TrainState) -> Any:
        optimizer = self.optimizer
        assert optimizer is not None

        def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
            loss, gradients, variables = self._gradients(state.parameters, batch, state.variables)
            # optax raises a float to the power of an integer count, which strict promotion refuses.
            trained, frozen = parted(state.parameters, self.trained)
            with jax.numpy_dtype_promotion("standard"):
                updates, new = optimizer.update(gradients, state.optimizer, trained)
            after: Any = optax.apply_updates(trained, updates)
            return TrainState(joined(after, frozen), new, variables), loss

        donated = (0,) if self.mapped.config.donate else ()
        return jax.jit(step, donate_argnums=donated, out_shardings=(shardings, self._named(P())))

    def _checked(self, compiled: Any) -> Any:
        """Return the function, which refuses a batch that does not divide before it is traced, and deals it out."""
        return _Checked(compiled, self.mapped, self._named(P(self.mapped.axes.batch or None)))


@dataclass(frozen=True)
class _Checked:
    """A compiled function of (state, batch) or (parameters, batch, variables). `lower` is jax.jit's."""

    compiled: Any
    mapped: Mapped
    batch_sharding: NamedSharding

    def __call__(self, state: Any, batch: Any, *variables: Any) -> Any:
        return self.compiled(state, self._dealt(batch), *variables)

    def lower(self, state: Any, batch: Any, *variables: Any) -> Any:
        return self.compiled.lower(state, self._dealt(batch), *variables)

    def _dealt(self, batch: Any) -> Any:
        """Return the batch at its place; of a jax.ShapeDtypeStruct, one with the sharding."""
        check_batch(batch, self.mapped.axes)
        check_micro_batches(batch, self.mapped.axes, self.mapped.config.micro_batches)
        place = self.batch_sharding

        def dealt(leaf: Any) -> Any:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
            return leaf if getattr(leaf, "sharding", None) == place else jax.device_put(leaf, place)

        return jax.tree.map(dealt, batch)


def _copied(value: Any, sharding: NamedSharding) -> jax.Array:
    """Return a copy at its place: donating the state leaves the arrays it was made from alone."""
    if isinstance(value, jax.Array):
        # device_put gives back the same buffer where it is in place already, whatever may_alias says.
        return jax.device_put(jnp.copy(value), sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: np.array(value[index]))
