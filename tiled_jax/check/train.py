"""One way of training a model for a few steps, and everything that it leaves behind."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shared_specs.check.checks import LEARNING_RATE, NUM_SHARDS, called, loss_of
from shared_specs.check.trained import Trained, TrainedStep, Value, coarsest
from shared_specs.errors import fail_type
from tiled_jax.check.watch import Observer, as_value, plain_name
from tiled_jax.models.tiling import paths_that_ran, tile_model, tiling_paths

Prepare = Callable[[Any], Any]
TrainStep = Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained. prepare: changes it beforehand, or returns another one. step, optimizer: None for the default.

    wrt: a filter of the variables that are trained.
    """

    prepare: Prepare | None
    step: TrainStep | None
    optimizer: Any
    steps: int
    wrt: Any

    def compiled(self, model: Any, batch: Any) -> "Compiled":
        """Return a step, compiled, and what it begins with. model: changed."""
        step = self.step_program(model)
        traced = jax.jit(step.run).trace(step.parameters, step.rest, batch)
        return Compiled(step=step, run=traced.lower().compile(), computes=_coarsest(traced.jaxpr))

    def train(self, compiled: "Compiled", batch: Any, unit: float = 0.0) -> Trained:
        """Return what training leaves behind. unit: of itself by which each parameter is changed first."""
        program, run = compiled.step, compiled.run
        parameters, rest = start, _ = disturbed(program.parameters, unit), program.rest
        found = Trained(steps=[], computes=compiled.computes)
        state = None if self.optimizer is None else self.optimizer.init(parameters)
        for _ in range(self.steps):
            program.watch.clear()
            loss, gradients, rest = jax.block_until_ready(run(parameters, rest, batch))
            jax.effects_barrier()
            if self.optimizer is None:
                updates = jax.tree.map(lambda g: -LEARNING_RATE * g, gradients)
            else:
                updates, state = self.optimizer.update(gradients, state, parameters)
            parameters = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), parameters, updates)
            step = TrainedStep(
                loss=as_value(loss),
                forward=dict(program.watch.forward),
                given=dict(program.watch.given),
                gradients=_from_the_loss_back(_named(gradients), program.watch.forward),
                updates=_changes(_named(parameters), _named(start)),
                buffers=_named(rest),
            )
            found.steps.append(step)
        found.paths = dict(program.paths)
        found.draws = program.draws
        return found

    def peak_bytes(self, model: Any, batch: Any) -> int:
        """Return the temporary bytes of the compiled program of one step without the optimizer's. model: changed."""
        program = self.step_program(model, watches=False)
        compiled = jax.jit(program.run).lower(program.parameters, program.rest, batch).compile()
        analysis: Any = compiled.memory_analysis()
        return int(analysis.temp_size_in_bytes)

    def step_program(self, model: Any, *, watches: bool = True) -> "StepProgram":
        """Return a step as a function of arrays. watches: whether modules tell what they return."""
        found = model if self.prepare is None else self.prepare(model)
        found = model if found is None else found
        return OfModule(found, self, watches) if isinstance(found, nnx.Module) else OfFunction(found, self)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A step as a function of arrays, compiled, and the coarsest dtype in it."""

    step: "StepProgram"
    run: Callable[..., Any]
    computes: str


class StepProgram:
    """A step as a function of arrays: `run(parameters, rest, batch) -> (loss, gradients, rest)`."""

    parameters: Any
    rest: Any
    draws = False

    def __init__(self, training: Training) -> None:
        self.watch = Observer()
        self.paths: dict[str, str] = {}
        self._training = training

    def run(self, parameters: Any, rest: Any, batch: Any) -> tuple[Any, Any, Any]:
        """Compute loss and gradients; of a step that returns both as it does."""

        def both(parameters: Any, rest: Any) -> tuple[Any, Any]:
            return self._stepped(parameters, rest, batch)

        shapes, _ = jax.eval_shape(both, parameters, rest)
        if isinstance(shapes, tuple):
            (loss, gradients), rest = both(parameters, rest)
        else:
            (loss, rest), gradients = jax.value_and_grad(both, has_aux=True)(parameters, rest)
        return loss, gradients, rest

    def _stepped(self, parameters: Any, rest: Any, batch: Any) -> tuple[Any, Any]:
        """Return the loss, or the loss and gradients, and the rest of the state after it."""
        raise NotImplementedError

    def _step(self, model: Any, batch: Any) -> Any:
        step = self._training.step
        found = loss_of(called(model, batch), _is_scalar) if step is None else step(model, batch)
        loss, *gradients = found if isinstance(found, tuple) else (found,)
        if not _is_scalar(loss) or len(gradients) > 1:
            rule = "a function that returns the loss, an array of one number, or it and the gradients"
            fail_type("check", "step", rule, type(loss).__name__)
        return found


class OfModule(StepProgram):
    """A step of a Flax nnx module."""

    def __init__(self, model: nnx.Module, training: Training, watches: bool) -> None:
        super().__init__(training)
        self._watches = watches
        self._known = tiling_paths(model)
        self._graph, self.parameters, self.rest = nnx.split(model, training.wrt, ...)
        self.draws = bool(nnx.to_flat_state(nnx.state(model, nnx.RngState)))

    def _stepped(self, parameters: Any, rest: Any, batch: Any) -> tuple[Any, Any]:
        # Variables of this trace: a dropout counts what it has drawn.
        model: Any = nnx.merge(self._graph, parameters, jax.tree.map(lambda a: a, rest))
        if self._watches:
            self.watch.follow(model, self._known)
        found = self._step(model, batch)
        self.paths = self._known | paths_that_ran(model)
        return found, nnx.split(model, self._training.wrt, ...)[2]


class OfFunction(StepProgram):
    """A step of a function and its variables, as a Flax linen module has them: (apply, variables)."""

    def __init__(self, model: tuple[Callable[..., Any], Any], training: Training) -> None:
        super().__init__(training)
        self._apply, variables = model
        self.parameters = variables["params"]
        self.rest = {name: value for name, value in variables.items() if name != "params"}

    def _stepped(self, parameters: Any, rest: Any, batch: Any) -> tuple[Any, Any]:
        return self._step(partial(self._apply, {"params": parameters, **rest}), batch), rest


def default_tile(model: Any) -> Any:
    """Tile a model in shards that are small enough to be several."""
    if not isinstance(model, nnx.Module):
        fail_type("check", "tile", "given for a function and its variables", "None")
    return tile_model(model, num_shards=NUM_SHARDS)


def disturbed(parameters: Any, unit: float) -> Any:
    """Return parameters that differ by this part of themselves, by chance up or down."""
    random = np.random.default_rng(0)

    def changed(array: Any) -> Any:
        if not (unit and is_floating(array)):
            return array
        up = 2.0 * random.integers(2, size=array.shape) - 1
        return jnp.asarray(np.asarray(array, np.float64) * (1 + up * unit), array.dtype)

    return jax.tree.map(changed, parameters)


def cast(tree: Any, dtype: Any) -> Any:
    """Return a tree whose floating-point arrays have this dtype."""
    return jax.tree.map(lambda a: jnp.asarray(a, dtype) if is_floating(a) else a, tree)


def is_floating(value: Any) -> bool:
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)


def computing_in(module: nnx.Module, dtype: Any) -> nnx.Module:
    """Return the module, with what says in which dtype it computes saying this one."""
    inside: Any
    for _, inside in nnx.iter_modules(module):
        if getattr(inside, "dtype", None) is not None:
            inside.dtype = dtype
    return module


def _is_scalar(value: Any) -> bool:
    return isinstance(value, jax.Array) and value.size == 1 and is_floating(value)


def _named(tree: Any) -> dict[str, Value]:
    """Return every array of a state or of linen's variables by its name; keys of random numbers are none."""
    if isinstance(tree, nnx.State):
        leaves = [(plain_name(path), leaf.get_value()) for path, leaf in nnx.to_flat_state(tree)]
    else:
        paths, _ = jax.tree_util.tree_flatten_with_path(tree)
        leaves = [
            (plain_name(getattr(key, "key", getattr(key, "idx", key)) for key in path), leaf) for path, leaf in paths
        ]
    return {name: as_value(leaf) for name, leaf in leaves if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)}


def _changes(now: Mapping[str, Value], before: Mapping[str, Value]) -> dict[str, Value]:
    return {name: Value(now[name].array.astype("float64") - before[name].array, now[name].dtype) for name in now}


def _from_the_loss_back(gradients: dict[str, Value], called: Mapping[str, Any]) -> dict[str, Value]:
    """Return gradients, those first whose modules returned last."""
    order = {name: number for number, name in enumerate(called)}

    def place(name: str) -> int:
        parts = name.split(".")
        return next((order[n] for end in range(len(parts), 0, -1) if (n := ".".join(parts[:end])) in order), -1)

    return dict(sorted(gradients.items(), key=lambda item: -place(item[0])))


def _coarsest(jaxpr: Any) -> str:
    """Return the coarsest dtype in a program."""
    text = str(jaxpr)
    names = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
    return coarsest(dtype for short, dtype in names.items() if f":{short}[" in text)
