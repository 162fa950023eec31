"""Kernels in JAX's GPU interpreter: operands, the float64 truth of what they return, and a clean state between tests.

And what a lowered one says of where its results go.
"""

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from shared_specs.core.rounding import DTYPES, compute_dtype, relative_error, round_to
from shared_specs.mlp.oracle import activate
from shared_specs.tolerances import limit
from tests.asserting import assert_within
from tiled_jax.core.mosaic import interpreter

Array = np.ndarray[Any, Any]

# In jax 0.10 the interpreter is private, slow, and misses most planted races.
FINDS_RACES = hasattr(plgpu, "InterpretGPUParams")


def race_finder() -> Any:
    """The interpreter that notes races, and goes on: from jax 0.12 on it would raise."""
    warns = "on_race" in inspect.signature(type(interpreter())).parameters
    return interpreter(detect_races=True, **({"on_race": "warn"} if warns else {}))


class CompiledOnce:
    """What the interpreter's threads run, each program compiled by the first one that needs it.

    Left alone, the threads compile it all at once, and in jax 0.10 each a copy of its own: most of the time of a test.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.programs: dict[Any, Any] = {}

    def run(self, jaxpr: Any, consts: Any, *args: Any) -> None:
        with self.lock:
            if jaxpr not in self.programs:
                self.programs[jaxpr] = self.compile(jaxpr, consts, *args)
        self.programs[jaxpr](consts, *args)

    def compile(self, jaxpr: Any, consts: Any, *args: Any) -> Any:
        def program(consts: Any, *args: Any) -> None:
            jax.core.eval_jaxpr(jaxpr, consts, *args)

        return jax.jit(program).lower(consts, *args).compile()


@contextmanager
def barriers_looked_for_once() -> Iterator[None]:
    """No barrier may be left when the last device of a kernel is through.

    One memory serves the devices of a mesh. Left alone, each looks through it when it is through itself, and finds what
    the others still use.
    """
    clear = gpu_callbacks._clear_shared_memory

    def look_and_clear() -> None:
        gpu_callbacks._get_shared_memory().assert_no_barriers_allocated()
        clear()

    with (
        mock.patch.object(gpu_callbacks, "_assert_no_barriers_allocated", lambda token: token),
        mock.patch.object(gpu_callbacks, "_clear_shared_memory", look_and_clear),
    ):
        yield


@contextmanager
def clean_interpreter() -> Iterator[None]:
    """A failure inside the interpreter leaves state behind that would fail whatever it runs next."""
    gpu_callbacks.reset_gpu_interpret_mode_state()
    try:
        with mock.patch.object(thread_map, "_run_jaxpr", CompiledOnce().run), barriers_looked_for_once():
            yield
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()


def operands(tokens: int, hidden: int, intermediate: int, dtype: str, biases: tuple[str, ...] = ()) -> dict[str, Any]:
    """The operands of one shard's kernels by name; gate and up are inputs of their own for `dgated`."""
    rng = np.random.default_rng(tokens)
    wide = {
        "x": rng.standard_normal((tokens, hidden)),
        "dy": rng.standard_normal((tokens, hidden)) + 0.25,
        "w_gate": rng.standard_normal((hidden, intermediate)) / np.sqrt(hidden),
        "w_up": rng.standard_normal((hidden, intermediate)) / np.sqrt(hidden),
        "w_down": rng.standard_normal((intermediate, hidden)) / np.sqrt(intermediate),
        "gate": rng.standard_normal((tokens, intermediate)),
        "up": rng.standard_normal((tokens, intermediate)),
    }
    wide |= {f"b_{name}": 0.5 * rng.standard_normal(intermediate) for name in biases}
    return {name: jnp.asarray(value.astype(DTYPES[dtype])) for name, value in wide.items()}


def truth(arrays: dict[str, Any], dtype: str, activation: str, *, rounded: bool) -> dict[str, Array]:
    """What the kernels return, in float64, or as a plain implementation in `dtype` rounds it."""
    a = {
        name: np.asarray(value).astype(compute_dtype(dtype) if rounded else np.float64)
        for name, value in arrays.items()
    }
    r = round_to(dtype) if rounded else lambda value: value
    gate = r(a["x"] @ a["w_gate"] + a.get("b_gate", 0))
    up = r(a["x"] @ a["w_up"] + a.get("b_up", 0))
    found = {"gate": gate, "up": up, "h": r(activate(activation, gate)[0] * up)}
    act, slope = activate(activation, a["gate"])
    dh = r(a["dy"] @ a["w_down"].T)
    return found | {"dgate": r(dh * a["up"] * slope), "dup": r(dh * act), "h_again": r(act * a["up"])}


def assert_true(found: dict[str, Any], arrays: dict[str, Any], dtype: str, activation: str) -> None:
    """Every result in `dtype` and as right as the shared tolerance asks. What nothing wrote is NaN, which never passes."""
    __tracebackhide__ = True
    exact, plain = (truth(arrays, dtype, activation, rounded=rounded) for rounded in (False, True))
    for name, value in found.items():
        assert str(value.dtype) == dtype
        allowed = limit(relative_error(plain[name], exact[name]), dtype)
        assert_within(np.asarray(value), exact[name], allowed, f"{activation} {dtype} {name}")


def written_over(fn: Any, *shapes: Any) -> int:
    """How many results of the kernels of a program, compiled and not interpreted, take the place of an operand."""
    text = jax.jit(fn).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu_v2" in text
    return text.count("output_operand_alias<")
