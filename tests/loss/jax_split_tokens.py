"""What the tests of tensor and sequence parallelism share: meshes, rings on demand, and what compiled programs hold."""

import math
import re
from collections import Counter
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.core.jax_counting import jaxprs_in
from tiled_jax.collectives.gathered_tokens import TokenAxis

Operands = dict[str, jax.Array]  # of an MLP: x, weights, and biases by their names alone
SPECS = {  # columns of gate and up, rows of down
    "w_gate": P(None, "tp"),
    "w_up": P(None, "tp"),
    "w_down": P("tp", None),
    "gate": P("tp"),
    "up": P("tp"),
    "down": P(None),
}

LOOPS = ("scan", "while", "tiled_turns")
COLLECTIVES = ("all_gather", "reduce_scatter", "ppermute", "psum", "pmax")


def mesh_of(ranks: int, data: int = 1, kind: AxisType = AxisType.Auto) -> Mesh:
    assert jax.device_count() == 8, "tests/conftest.py asks for eight virtual devices"
    devices = np.asarray(jax.devices()[: data * ranks]).reshape(data, ranks)
    return Mesh(devices, ("data", "tp"), axis_types=(kind,) * 2)


def place(mesh: Mesh, arrays: Any, specs: Any) -> Any:
    return jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), arrays, specs)


def abstract(mesh: Mesh, shape: tuple[int, ...], spec: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def called(fn: Any, given: Operands, **options: Any) -> jax.Array:
    """The MLP `fn` of these operands."""
    biases = {name: given[name] for name in ("gate", "up", "down") if name in given}
    return fn(given["x"], given.get("w_gate"), given["w_up"], given["w_down"], biases=biases, **options)


def use_rings(monkeypatch: Any, ring: bool = True) -> None:
    """Sums that nothing hides go around a ring, as on TPUs, or not, as elsewhere."""
    of = classmethod(lambda cls, name, shard_tokens: cls(name, lax.axis_size(name), ring))
    monkeypatch.setattr(TokenAxis, "of", of)


def largest_arrays(text: str) -> Counter[str]:
    """Of a compiled program, per device: elements of the largest array of all, and of the largest that is gathered."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        gather = re.search(r"\ball-gather(-start|-done)?\(", line)
        results = line[: gather.start()] if gather else line
        for dims in re.findall(r"\b[a-z]+[0-9]+\[([0-9,]+)\]", results):
            size = math.prod(map(int, dims.split(",")))
            found["any"] = max(found["any"], size)
            if gather:
                found["gathered"] = max(found["gathered"], size)
    return found


def count_collectives(fn: Any, *arguments: Any) -> dict[bool, Counter[str]]:
    """Collectives of the program by name, outside (False) and inside (True) of its loops."""
    found: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

    def walk(jaxpr: Any, in_loop: bool) -> None:
        for equation in jaxpr.eqns:
            name = next((name for name in COLLECTIVES if equation.primitive.name.startswith(name)), None)
            if name is not None:
                found[in_loop][name] += 1
            for value in equation.params.values():
                for inner in jaxprs_in(value):
                    walk(inner, in_loop or equation.primitive.name in LOOPS)

    walk(jax.jit(fn).trace(*arguments).jaxpr.jaxpr, False)
    return found
