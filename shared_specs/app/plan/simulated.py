"""A plan beside a simulation of its step: bytes of two shallow models, from which those of any depth follow."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from shared_specs.app.plan.decoder import Decoder
from shared_specs.app.plan.step import RESERVE, Setting, optimizer_bytes, parts_of

# Depths of the two shallow models, the least from which on a layer more is the same whatever the depth: in the backward of
# one there are then the weights of the next and the gradients of the one before.
DEPTHS = (3, 4)


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Bytes of one step that was run, or compiled, without a device to run it on.

    Attributes:
        moments: part of the step -> kind of memory -> bytes on one GPU, at that part's peak.
        host: bytes in host memory for it. collectives: name -> how often a rank makes it in a step.
    """

    moments: dict[str, dict[str, int]]
    host: int = 0
    collectives: dict[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> str:
        """Return the part of the step that takes most."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def device(self) -> int:
        """Return the bytes on one GPU at the peak of the step."""
        return sum(self.moments[self.peak].values())


Simulate = Callable[[Decoder, Setting], Simulated]


class Simulator(NamedTuple):
    """A half's way to simulate its step.

    Attributes:
        simulate: one step with all layers of the decoder that it is given, without an optimizer. setting_simulated: the
            setting that it runs in place of one, where this machine cannot do that one's. whole: all layers cost it no more
            than a few, as where they are a loop in a program.
    """

    simulate: Simulate
    setting_simulated: Callable[[Setting], Setting] = lambda setting: setting
    whole: bool = False


def simulated_step(decoder: Decoder, setting: Setting, simulator: Simulator) -> Simulated:
    """Return the bytes of a whole step, from those of two depths where the model is deeper, and with the optimizer's state.

    The state that an optimizer keeps lies there from step to step, on the device or on the host; what its step itself takes
    is gone when the next forward begins, and was there when there were no activations.
    """
    if simulator.whole or decoder.layers <= DEPTHS[-1]:
        found = simulator.simulate(decoder, setting)
    else:
        shallow, deep = (simulator.simulate(replace(decoder, layers=layers), setting) for layers in DEPTHS)
        found = _at_depth(decoder.layers, shallow, deep)
    state = optimizer_bytes(decoder, setting.optimizer) // setting.gpus
    if setting.host_state:
        return replace(found, host=found.host + state)
    return replace(found, moments={name: kinds | {"optimizer": state} for name, kinds in found.moments.items()})


def beside_simulation(decoder: Decoder, setting: Setting, simulator: Simulator) -> dict[str, Any]:
    """Return what the formulas say and what the simulation shows of one setting, as plain values."""
    setting = simulator.setting_simulated(setting)
    found = simulated_step(decoder, setting, simulator)
    return {
        "set": asdict(setting),
        "predicted_bytes": predicted_device(decoder, setting),
        "simulated_bytes": found.device,
        "predicted_host_bytes": parts_of(decoder, setting).host,
        "simulated_host_bytes": found.host,
        "peak": found.peak,
        "moments": found.moments,
        "collectives": found.collectives,
    }


def predicted_device(decoder: Decoder, setting: Setting) -> int:
    """Return what the formulas say of the same, without the reserve, which no simulation shows."""
    return parts_of(decoder, setting).total - RESERVE


def _at_depth(layers: int, shallow: Simulated, deep: Simulated) -> Simulated:
    """The lines through both."""

    def lines(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
        return {name: line(first.get(name, 0), second.get(name, 0)) for name in {**first, **second}}

    def line(first: int, second: int) -> int:
        few, many = DEPTHS
        return first + (layers - few) * (second - first) // (many - few)

    return Simulated(
        moments={name: lines(kinds, deep.moments[name]) for name, kinds in shallow.moments.items()},
        host=line(shallow.host, deep.host),
        collectives=lines(shallow.collectives, deep.collectives),
    )
