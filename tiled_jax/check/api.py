"""`check`: whether a model trains tiled as it does untiled, and which tensor differs first."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shared_specs.check.checks import check_arguments
from shared_specs.check.compare import UNIT
from shared_specs.check.comparison import TwoWays, Way, running
from shared_specs.check.report import CheckReport
from shared_specs.check.trained import Trained
from shared_specs.errors import fail_type
from tiled_jax.check.train import Compiled, Prepare, Training, TrainStep, cast, computing_in, default_tile, is_floating


def check(
    model: Any,
    batch: Any,
    *,
    tile: Prepare | None = None,
    plain: Prepare | None = None,
    step: TrainStep | None = None,
    plain_step: TrainStep | None = None,
    optimizer: Any = None,
    steps: int = 2,
    seed: int = 0,
    wrt: Any = nnx.Param,
) -> CheckReport:
    """Train a model tiled and untiled, and return a report of the first difference, if there is one.

    Both trainings start with the same state and the same random numbers. A third training, untiled in float64 (else float32),
    measures the rounding error of the untiled one. The tiled one may have an error of the same size. `check` compares, in this
    order, the results of modules, the loss, gradients from the last parameter back, the changes of parameters, and the rest of
    the state.

    To check a whole training setup (a mesh, accumulation), put it into `tile` and `step`. Put the equivalent plain training
    into `plain` and `plain_step`. Steps are compiled.

    Args:
        model: an nnx.Module, which is copied; a function that makes one and is called for each training; or a function and its
            variables, such as (linen_module.apply, variables). In the last case "params" are trained and the modules' results
            are not compared.
        batch: the arguments of the model: a mapping for keyword arguments, a tuple for positional ones.
        tile: a function of a copy of the model that returns what is trained; None: `tile_model` with four shards.
        plain: the same for the untiled model; None leaves it unchanged.
        step: a function of the result of `tile` (a function bound to its variables) and the batch that returns the loss. If it
            differentiates itself, it returns the loss and the gradients of the parameters. None: the loss that the model
            returns.
        plain_step: the same for the untiled model; None: `step`.
        optimizer: an optax.GradientTransformation; None: plain gradient descent.
        steps: the number of optimizer steps. seed: of the random numbers.
        wrt: a filter of the variables that are trained, as in nnx.Optimizer.
    Returns:
        shared_specs.check.report.CheckReport: `equal`, `first`, `results`, `paths`; as text, a summary.
    Numerics: limits are those of shared_specs.tolerances, relative to the errors of the untiled training.
    Memory: three copies of the model, one after the other, and its gradients three times a step in host memory.
    Raises:
        SpecError, TypeError: an argument is wrong; the model, `tile` or a step fails.
        UnsupportedError: nothing of the model can be tiled.
    Source: derived in shared_specs/README.md.
    Example:
        >>> layers = [nnx.Linear(8, 12, rngs=nnx.Rngs(0)), nnx.gelu, nnx.Linear(12, 8, rngs=nnx.Rngs(1))]
        >>> def loss(model, x):
        ...     return jnp.mean(model(x) ** 2)
        >>> check(nnx.Sequential(*layers), jnp.ones((2, 8, 8)), step=loss).equal
        True
    """
    check_arguments(steps, seed, tile=tile, plain=plain, step=step, plain_step=plain_step)
    if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        fail_type("check", "optimizer", "an optax.GradientTransformation or None", type(optimizer).__name__)
    is_pair = isinstance(model, tuple) and len(model) == 2 and callable(model[0]) and "params" in model[1]
    if not (is_pair or isinstance(model, nnx.Module) or callable(model)):
        rule = "a flax.nnx.Module, a function that makes one or (apply, variables)"
        fail_type("check", "model", rule, type(model).__name__)
    ways: dict[Way, Training] = {
        "untiled": Training(prepare=plain, step=plain_step or step, optimizer=optimizer, steps=steps, wrt=wrt),
        "tiled": Training(prepare=tile or default_tile, step=step, optimizer=optimizer, steps=steps, wrt=wrt),
    }
    return TwoWays(JaxTrainings(model, batch, ways), seed, plain_step is None or plain_step is step).report()


class JaxTrainings:
    """See `shared_specs.check.comparison.TrainsBothWays`."""

    def __init__(self, model: Any, batch: Any, ways: dict[Way, Training]) -> None:
        self._ways, self._batch = ways, batch
        self._compiled: dict[tuple[Any, ...], Compiled] = {}
        made = running("making the model", model) if callable(model) and not isinstance(model, nnx.Module) else model
        if not isinstance(made, nnx.Module | tuple):
            fail_type("check", "model", "a function that makes a flax.nnx.Module", type(made).__name__)
        self._model: nnx.Module | tuple[Callable[..., Any], Any] = made
        state = made[1] if isinstance(made, tuple) else nnx.state(made)
        self._dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(state) if is_floating(leaf)}

    def wide(self) -> tuple[str, ...]:
        return ("float64", "float32") if self._dtypes <= {"bfloat16", "float16"} else ("float64",)

    def train(self, way: Way, *, seed: int, dtype: str = "", evaluates: bool = False, disturbed: str = "") -> Trained:
        # What is float32 in a wide training may stay so: some digits less, and no error.
        promotion = jax.numpy_dtype_promotion("standard") if dtype else nullcontext()
        with jax.enable_x64(dtype == "float64" or "float64" in self._dtypes), promotion:
            wide = jnp.dtype(dtype) if dtype else None
            batch = self._batch if wide is None else cast(self._batch, wide)
            unit = UNIT[disturbed] if disturbed else 0.0
            key = (way, seed, dtype, evaluates)
            if key not in self._compiled:
                self._compiled[key] = self._ways[way].compiled(self._copy(seed, wide, evaluates), batch)
            return self._ways[way].train(self._compiled[key], batch, unit)

    def peak_bytes(self, way: Way, *, evaluates: bool = False) -> int:
        with jax.enable_x64("float64" in self._dtypes):
            return self._ways[way].peak_bytes(self._copy(0, None, evaluates), self._batch)

    def _copy(self, seed: int, dtype: Any, evaluates: bool) -> Any:
        if isinstance(self._model, tuple):
            apply, variables = self._model
            return apply, variables if dtype is None else cast(variables, dtype)
        graph, state = nnx.split(self._model)
        found: Any = nnx.merge(graph, jax.tree.map(lambda a: a, state) if dtype is None else cast(state, dtype))
        keys = nnx.state(found, nnx.RngKey)
        nnx.update(found, jax.tree.map(lambda key: jax.random.fold_in(key, seed), keys))
        if dtype is not None:
            found = computing_in(found, dtype)
        if evaluates:
            found.eval()
        return found
