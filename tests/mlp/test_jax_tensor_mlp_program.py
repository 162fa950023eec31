"""What the programs of the tensor-parallel MLP hold and send: gathered shards, temporary bytes, rings where they are taken."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shared_specs.collectives.costs import gathered_plan, in_flight_bytes
from shared_specs.collectives.sequence_plan import SequencePlan
from shared_specs.config import Tiling
from shared_specs.mlp.costs import MLPShape, saved_bytes
from shared_specs.mlp.sequence_costs import compiled_sequence_peak_bytes
from shared_specs.tolerances import COST_BYTES
from tests.core.jax_counting import temp_bytes
from tests.loss.jax_split_tokens import SPECS, Operands, abstract, called, largest_arrays, mesh_of, use_rings
from tiled_jax.collectives.gathered_tokens import TokenAxis
from tiled_jax.parallel import tensor_parallel_mlp

pytestmark = pytest.mark.ranks


def program(mesh: jax.sharding.Mesh, local: int, t: int, *, gradients: bool, keep: float = 0.0) -> tuple[Any, Any]:
    """y, perhaps with gradients, of `local` tokens on every device, H = 64; and its arguments."""
    tokens, hidden, intermediate = local * mesh.size, 64, 64
    x = abstract(mesh, (tokens, hidden), P("tp", None), jnp.float32)
    shapes = {"w_gate": (hidden, intermediate), "w_up": (hidden, intermediate), "w_down": (intermediate, hidden)}
    given = {"x": x} | {name: abstract(mesh, shape, SPECS[name], jnp.float32) for name, shape in shapes.items()}
    on_device = partial(
        called, tensor_parallel_mlp, sequence_parallel=True, tiling=Tiling(shard_tokens=t, keep=keep), axis_name="tp"
    )
    specs = {name: SPECS.get(name, P("tp", None)) for name in given}
    fn = jax.shard_map(on_device, mesh=mesh, in_specs=(specs,), out_specs=P("tp", None))

    def run(dy: jax.Array, given: Operands) -> Any:
        if not gradients:
            return fn(given)
        y, pull = jax.vjp(fn, given)
        return y, pull(dy)

    return run, (x, given)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_no_device_holds_the_full_sequence(kind: AxisType) -> None:
    """Of 4096 tokens over four devices, 64 of each at a time: nothing of [T, H] in the program, and no gather beyond R t."""
    mesh = mesh_of(4, 1, kind)
    with jax.set_mesh(mesh):
        run, arguments = program(mesh, 1024, 64, gradients=True)
        found = largest_arrays(jax.jit(run).lower(*arguments).compile().as_text())
    assert found["gathered"] == 4 * 64 * 64
    assert found["any"] == 1024 * 64  # x, y and their gradients of a device's own tokens


def test_gathering_everything_shows_that_the_meter_sees_it() -> None:
    mesh = mesh_of(4)
    run, arguments = program(mesh, 1024, 1024, gradients=True)
    assert largest_arrays(jax.jit(run).lower(*arguments).compile().as_text())["gathered"] == 4 * 1024 * 64


@pytest.mark.parametrize("ring", [True, False])
def test_two_gathered_shards_are_alive(ring: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary bytes of forward: x of two gathered shards, 2 R t H elements, and h; without a ring the partial sums of y,
    for which h has room."""
    use_rings(monkeypatch, ring)
    run, arguments = program(mesh_of(4), 1024, 64, gradients=False)
    rows = 4 * 64
    expected = 4 * (2 * rows * 64 + (rows * 16 if ring else rows * 64))
    assert abs(temp_bytes(run, *arguments) - expected) <= COST_BYTES * expected


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(("keep", "ring"), [(0.0, True), (0.5, False)])
def test_temp_bytes_do_not_grow_with_tokens(keep: float, ring: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use_rings(monkeypatch, ring)
    found = []
    for local in (512, 1024):
        run, arguments = program(mesh_of(4), local, 64, gradients=True, keep=keep)
        shape = MLPShape(tokens=4 * local, hidden=64, intermediate=16)
        plan = SequencePlan((local,) * 4, 64)
        found.append(temp_bytes(run, *arguments) - saved_bytes(shape, gathered_plan(plan), keep=keep))
        assert found[-1] <= compiled_sequence_peak_bytes(shape, plan)
    assert found[0] == found[1]
    assert in_flight_bytes(shape, plan, upstream=64) < compiled_sequence_peak_bytes(shape, plan)


@pytest.mark.parametrize(("backend", "rows", "ring"), [("tpu", 512, True), ("tpu", 511, False), ("gpu", 512, False)])
def test_where_a_ring_is_taken(backend: str, rows: int, ring: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    found = []

    def on_device() -> None:
        found.append(TokenAxis.of("tp", rows).ring)

    jax.eval_shape(jax.shard_map(on_device, mesh=mesh_of(2), in_specs=(), out_specs=None))
    assert found == [ring]


@pytest.mark.parametrize(("backend", "ring"), [("tpu", True), ("gpu", False)])
def test_programs_with_and_without_rings(backend: str, ring: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowered for either: two loop bodies' sums of y over four devices, as three steps each beside four products or as one."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    mesh, specs = mesh_of(4), (P("tp", None), SPECS["w_gate"], SPECS["w_up"], SPECS["w_down"])
    fn = partial(
        tensor_parallel_mlp, sequence_parallel=True, tiling=Tiling(shard_tokens=512), backend="xla", axis_name="tp"
    )
    shapes = ((4096, 16), (16, 32), (16, 32), (32, 16))
    given = [abstract(mesh, shape, spec, jnp.bfloat16) for shape, spec in zip(shapes, specs, strict=True)]
    program = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=specs[0])).trace(*given)
    text = program.lower(lowering_platforms=("tpu" if ring else "cuda",)).as_text()
    counts = [text.count(f"stablehlo.{name}") for name in ("collective_permute", "dot_general")]
    assert counts == ([2 * 3, 2 * (2 + 4)] if ring else [0, 2 * 3])
    assert ("stablehlo.reduce_scatter" in text) != ring


def test_the_first_turn_of_a_loop_waits_for_the_shard_before() -> None:
    """Else XLA, which cuts it off where a loop has collectives, may run both at once, with the buffers of both."""
    mesh = mesh_of(4)
    run, arguments = program(mesh, 1024, 64, gradients=True)
    loops = [
        (jaxpr, equation)
        for jaxpr in jaxprs_of(jax.make_jaxpr(run)(*arguments).jaxpr)
        for equation in jaxpr.eqns
        if equation.primitive.name in ("while", "scan")
    ]
    assert len(loops) == 2  # of forward and of backward
    for jaxpr, loop in loops:
        barriers = (
            each for each in jaxpr.eqns if "optimization_barrier" in str(each)
        )  # alone, or in the call of a rule
        waited = {id(out) for each in barriers if each is not loop for out in each.outvars}
        carried = [a for a in loop.invars if id(a) in waited]
        assert any(a.aval.shape == (4 * 64, 64) for a in carried), "the gathered shard is there at once"


def jaxprs_of(jaxpr: Any) -> Iterator[Any]:
    """A program and all that are called inside, loops' bodies too."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda a: hasattr(a, "eqns") or hasattr(a, "jaxpr")
        ):
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                yield from jaxprs_of(getattr(inner, "jaxpr", inner))
