"""The bytes of a step of a model that no formula knows: the step is compiled at a few lengths, and what XLA says counts.

The model is as it is: its own modules, tiled or not, rematerialised or not. `parallelize` shards it over the devices, which are
those of this process; where these are no GPUs and JAX's CUDA plugin is installed, an H200 is described to the compiler.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shared_specs.app.option_fields import InputError
from shared_specs.app.plan.decoder import Decoder
from shared_specs.app.plan.function.measured import FEWEST, Lengths, Measurement
from shared_specs.app.plan.held import Parameter, held_of
from shared_specs.app.plan.setting import Setting
from shared_specs.errors import SpecError
from tiled_jax.models.model_loss import tiled_model_loss
from tiled_jax.plan.described import UNCHECKED, UNTUNED, compiles_for_gpus, described_mesh
from tiled_jax.plan.trained import trained_filter, with_trained
from tiled_jax.plans.api import Loss, parallelize

# Tokens of the longest sequence that is compiled where another is asked for: what grows with them does so as before.
MOST = FEWEST << 3
_PLUGIN = f"JAX's CUDA plugin compiles for GPUs that are not there, if {UNCHECKED}=1 is set before JAX starts."
_SHAPE = re.compile(r"\b[a-z]+\d*\[([\d,]+)\]")


@dataclass
class MeasuredStep:
    """The step of one model, compiled when a plan asks.

    Attributes:
        what: the function and the argument that the model is of, for messages. shapes: the model without values.
        loss_fn, wrt: as in `parallelize`. asked: tokens of a sequence for which the step itself is compiled, and no other one.
    """

    what: str
    shapes: Any = field(repr=False)
    loss_fn: Loss
    wrt: Any
    asked: int
    _known: dict[tuple[int, int, str], int] = field(default_factory=dict, repr=False)
    _lengths: dict[tuple[int, int, str], Lengths] = field(default_factory=dict, repr=False)

    def bytes_of(self, setting: Setting) -> int:
        """Return the bytes of one device: arguments, results and all between, of forward and backward.

        Raises:
            InputError: there are no such devices, or the model cannot run so many tokens.
        """
        key = setting.gpus, setting.sequences, setting.dtype
        if key not in self._lengths:
            self._lengths[key] = Lengths(partial(self._measure, setting), MOST)
        try:
            if setting.tokens != self.asked:
                return self._lengths[key].bytes_at(setting.tokens)
            if key not in self._known:
                self._known[key] = self._measure(setting, self.asked).peak
            return self._known[key]
        except (InputError, SpecError):
            raise
        except Exception as error:  # of code that is not ours
            said = str(error).strip().partition("\n")[0] or type(error).__name__
            sizes = f"{setting.sequences} x {setting.tokens}"
            raise InputError(f"{self.what} must have a loss of {sizes} tokens: {said}") from error

    def _measure(self, setting: Setting, tokens: int) -> Measurement:
        mesh = self._mesh(setting)
        made = parallelize(self.shapes, mesh, setting.config, loss_fn=self.loss_fn, wrt=self.wrt)
        batch = jax.ShapeDtypeStruct((setting.sequences * setting.gpus, tokens + 1), jnp.int32)
        variables = (made.shapes.variables,) * bool(jax.tree.leaves(made.shapes.variables))
        described = jax.default_backend() == "cpu" and mesh.devices.flat[0].platform != "cpu"
        options = UNTUNED if described else None
        program = made.gradients.lower(made.shapes.parameters, batch, *variables).compile(options)
        found, text = program.memory_analysis(), program.as_text()
        peak = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
        sizes = frozenset(prod(map(int, shape.split(","))) for shape in _SHAPE.findall(text))
        return Measurement(peak - found.alias_size_in_bytes, sizes, 1)

    def _mesh(self, setting: Setting) -> jax.sharding.Mesh:
        """Return the mesh of so many devices that the step is compiled for."""
        function, gpus, cpu = self.what.partition(":")[0], setting.gpus, jax.default_backend() == "cpu"
        if cpu and compiles_for_gpus():
            try:
                return described_mesh(setting.axes)
            except Exception as error:  # of JAX
                said = (
                    f"{function}: JAX must have started with {UNCHECKED}=1, without which its CUDA plugin needs a GPU"
                )
                raise InputError(f"{said}: {error}") from error
        if cpu and setting.dtype != "float32":
            raise InputError(f"{function}: dtype must be float32 without GPUs, got {setting.dtype}. {_PLUGIN}")
        if jax.device_count() < gpus:
            rule = f"at most {jax.device_count()}, for which the model's step can be compiled here"
            raise InputError(f"{function}: devices must be {rule}, got {gpus}. {_PLUGIN}")
        return jax.make_mesh((gpus,), tuple(setting.axes), devices=jax.devices()[:gpus])


def measured_decoder(function: str, model: nnx.Module, wrt: Any, loss_fn: Loss | None, tokens: int) -> Decoder:
    """Return a decoder of no sizes but its parameters, whose step is measured. The model is not changed.

    loss_fn: None is the cross entropy of the logits model(tokens), of each token's next one. tokens: `MeasuredStep.asked`.
    Raises:
        TypeError: wrt is no filter.
    """
    found = with_trained(function, model, wrt)
    parameters = [Parameter("ends", None, value.size, value.dtype.itemsize, trained) for _, value, trained in found]
    graph, state = nnx.split(model)
    shapes = nnx.merge(graph, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state))
    step = MeasuredStep(f"{function}: model", shapes, loss_fn or _next_token, trained_filter(model, wrt), tokens)
    sizes = dict.fromkeys(("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab"), 0)
    held = held_of(parameters, tied=False)
    return Decoder(**sizes, kind=type(model).__name__, by_structure=True, whole=step.bytes_of, held=held)


def _next_token(model: Callable[[jax.Array], jax.Array], tokens: jax.Array) -> jax.Array:
    found: jax.Array = tiled_model_loss(model, tokens[:, 1:], tokens[:, :-1])
    return found
