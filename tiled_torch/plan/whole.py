"""The bytes of a step of a model that no formula knows: the step runs without values at a few lengths, and its tensors count.

The model is as it is: its own modules, tiled or not. `parallelize` shards and recomputes its layers where it knows them, and
has it as one unit where it does not.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shared_specs.app.option_fields import InputError
from shared_specs.app.plan.decoder import Decoder
from shared_specs.app.plan.function.measured import FEWEST, Lengths, Measurement
from shared_specs.app.plan.held import Parameter, held_of
from shared_specs.app.plan.setting import Setting
from shared_specs.config import Checkpointing
from shared_specs.errors import SpecError
from tiled_torch.check.live_bytes import LiveBytes
from tiled_torch.core.partitioned import whole_shape
from tiled_torch.models.heads.model_loss import tiled_model_loss
from tiled_torch.models.heads.planned import Zeros, copied_without_memory
from tiled_torch.plan.inputs import inputs_of, without_values
from tiled_torch.plan.twin import cast_parameters, count_flash, first_line, positions_of
from tiled_torch.plan.units import gathered_units
from tiled_torch.plans.data import cast_inputs, units_of
from tiled_torch.plans.recompute import apply_checkpointing
from tiled_torch.plans.registry import Plan, plan_of

_FEW = 8  # tokens of the step that shows first whether there is one without values

Loss = Callable[[Any, Tensor], Tensor]
"""loss_fn(model, int64 [sequences, tokens + 1]) -> the mean."""


@dataclass
class MeasuredStep:
    """The step of one model, run when a plan asks.

    Attributes:
        what: the function and the argument that the model is of, for messages. twin: the model without values.
        loss_fn: None is the model's own loss, or of a model without one the cross entropy of each token's next one.
        layers: as `parallelize` knows them. held: bytes of all parameters. positions: see `Decoder`.
        only: tokens of a sequence, where it takes no others (Reformer, whose positions have two axes), and shorter ones are
            padded; None: it takes any. answer: to code that asks for values.
    """

    what: str
    twin: Any = field(repr=False)
    loss_fn: Loss | None
    layers: Plan
    held: int
    positions: int | None
    only: int | None = None
    answer: int = 0
    _itemsizes: dict[int, int] = field(init=False, repr=False)
    _lengths: dict[tuple[int, int, str], Lengths] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._itemsizes = {id(parameter): parameter.element_size() for parameter in self.twin.parameters()}

    def bytes_of(self, setting: Setting) -> int:
        """Return the bytes of one device: its part of weights and gradients, and all of forward and backward.

        Raises:
            InputError: the model cannot run so many tokens without values.
        """
        key = setting.gpus, setting.sequences, setting.dtype
        if key not in self._lengths:
            most = 1 if self.only else self.positions  # none of several lengths
            self._lengths[key] = Lengths(partial(self.measure, setting), most)
        try:
            found = self._lengths[key].bytes_at(self.only or setting.tokens)
        except SpecError:
            raise
        except Exception as error:  # of code that is not ours
            sizes = f"{setting.sequences} x {setting.tokens}"
            said = first_line(error, "it")
            raise InputError(f"{self.what} must run {sizes} tokens without values: {said}") from error
        return self.held // setting.gpus + found

    def check(self, tokens: int) -> None:
        """Check that a step of so many tokens runs without values, and is the same whatever code that asks for some is told.

        What ends in an assertion of the model's own, such as that ids are not negative, is no answer for it (UDOP).
        Raises:
            Exception: of code that is not ours, or since it is not.
        """
        few = Setting(tokens=tokens, gpus=1, dtype="float32")
        found: dict[int, Measurement] = {}
        for answer in (0, 1):
            zeros = Zeros(answer)
            try:
                found[answer] = self.measure(few, tokens, zeros)
            except AssertionError:
                if not zeros.asked or (answer and not found):
                    raise
            if not zeros.asked:
                break
        self.answer, *others = found
        if any(found[other] != found[self.answer] for other in others):
            raise RuntimeError(f"a {type(self.twin).__name__} asks for values, on which its sizes depend")

    def measure(self, setting: Setting, tokens: int, zeros: Zeros | None = None) -> Measurement:
        """Return what one step takes beside weights: what is gathered and cut of them, gradients, all tensors and buffers."""
        twin, data = self.twin, setting.config.data
        assert data is not None
        cast_parameters(twin, getattr(torch, setting.dtype))
        units = units_of(twin, data, self.layers)
        casts = cast_inputs(twin, data, self.layers)
        try:
            with (
                without_values(twin),
                zeros or Zeros(self.answer),
                LiveBytes() as live,
                gathered_units(units, setting.gpus, setting.itemsize, self._itemsizes) as end,
            ):
                self._loss(setting.sequences, tokens).backward()
                end()
        finally:
            for handle in casts:
                handle.remove()
        buffers = sum(buffer.nbytes for buffer in twin.buffers())
        return Measurement(live.peak + buffers, frozenset(live.sizes), live.steps)

    def _loss(self, sequences: int, tokens: int) -> Tensor:
        twin, ids = self.twin, torch.zeros(sequences, tokens + 1, dtype=torch.long, device="meta")
        if self.loss_fn is not None:
            return self.loss_fn(twin, ids)
        if not hasattr(getattr(twin, "config", None), "to_dict"):  # none of transformers'
            found: Tensor = tiled_model_loss(twin, ids[:, 1:], ids[:, :-1])
            return found
        return twin(**inputs_of(twin, sequences, tokens), labels=ids[:, :-1]).loss  # type: ignore[no-any-return]


def _only_length(step: MeasuredStep, tokens: int) -> int | None:
    """Return the tokens of a sequence for a model that takes no others; None for one that takes others, if not all.

    Raises:
        Exception: of code that is not ours, or as `MeasuredStep.check`: it takes none.
    """
    for length in (_FEW, FEWEST):
        try:
            step.check(length)
        except Exception:  # of code that is not ours
            continue
        return None
    step.check(tokens or _FEW)
    return tokens


def whole_decoder(function: str, model: nn.Module, loss_fn: Loss | None, tokens: int) -> Decoder:
    """Return a decoder of no sizes but its parameters, whose step is measured. The model is not changed.

    tokens: of a sequence, for a model that takes no others.
    Raises:
        InputError: it has no step without values.
    """
    what = f"{function}: model"
    sizes = dict.fromkeys(("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab"), 0)
    parameters = [
        Parameter("ends", None, prod(whole_shape(p)), p.element_size(), p.requires_grad) for p in model.parameters()
    ]
    held = held_of(parameters, tied=False)
    try:
        twin = copied_without_memory(model).train()
        for module in twin.modules():
            count_flash(getattr(module, "config", None))
        layers = plan_of(twin, function)
        step = MeasuredStep(what, twin, loss_fn, layers, held.bytes, positions_of(twin))
        if layers.no_layers is None:
            apply_checkpointing(twin, Checkpointing(), layers)
        step.only = _only_length(step, tokens)
        step.positions = step.only or step.positions
    except SpecError:
        raise
    except Exception as error:  # of code that is not ours
        raise InputError(f"{what} must have a step that runs without values: {first_line(error, 'it')}") from error
    return Decoder(
        **sizes,
        kind=type(model).__name__,
        by_structure=True,
        whole=step.bytes_of,
        recomputed=layers.no_layers is None,
        positions=step.positions,
        held=held,
    )
