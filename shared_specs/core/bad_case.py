"""One bad input with the one message that both halves must raise before any work is done."""

from dataclasses import dataclass, field
from typing import Any

from shared_specs.config import HALVES, Half, HalfNames
from shared_specs.errors import SpecError

# By package, two devices that every machine has: JAX's are virtual (tests/conftest.py).
DEVICES = {"tiled_torch": ("cpu", "meta"), "tiled_jax": ("cpu:0", "cpu:1")}


@dataclass(frozen=True, kw_only=True)
class BadCase:
    """One change to the good call and what it must raise.

    Args:
        shapes: canonical shapes that differ from the good call; biases as b_gate, b_up, b_down (loss: bias).
        target: the value of every target (loss). class_weight: the shape of one (loss).
        dtypes: dtypes that differ from float32. arguments: keyword arguments of the call.
        transposed: weights handed over in the layout of the other half. operands: handed over as they stand here.
        elsewhere: operands on the second of the half's DEVICES, where everything else is on the first.
        message: the whole text, with `{package}`, `{layout}`, `{backends}`, `{device}`, `{other_device}` and `{w_A_B}`
            or `{w_E_A_B}` to fill in.
        halves: where it applies; a half that is left out accepts the input by its framework's own custom.
    """

    id: str
    message: str
    error: type[Exception] = SpecError
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    dtypes: dict[str, str] = field(default_factory=dict[str, str])
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    transposed: tuple[str, ...] = ()
    operands: dict[str, Any] = field(default_factory=dict[str, Any])
    elsewhere: tuple[str, ...] = ()
    target: int = 1
    class_weight: tuple[int, ...] | None = None
    halves: tuple[Half, ...] = HALVES

    def text(self, names: HalfNames) -> str:
        """Return the expected message in one half's words."""
        return self.message.format_map(_Words(names))


class _Words(dict[str, str]):
    def __init__(self, names: HalfNames) -> None:
        device, other = DEVICES[names.package]
        super().__init__(
            package=names.package,
            layout=names.layout,
            backends=", ".join(names.backends),
            device=device,
            other_device=other,
        )
        self.names = names

    def __missing__(self, key: str) -> str:
        *lead, inputs, outputs = key.split("_")[1:]
        return f"[{', '.join([*lead, *((inputs, outputs) if self.names.input_dim_first else (outputs, inputs))])}]"


X_IS = " (x is [2, 3, 8])"


LET_PLAN = " Pass num_shards=None to let the plan choose."


TRANSPOSED = "{package} keeps weights {layout}. This one is transposed."
