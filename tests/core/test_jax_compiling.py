"""Programs of several collectives are compiled anew by every run: `compiled_once_a_session` keeps the others."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P


@pytest.mark.parametrize(("collectives", "kept"), [(0, True), (1, True), (2, False)])
def test_programs_of_several_collectives_are_not_kept(collectives: int, kept: bool) -> None:
    """They come from a cache without the order of their collectives."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P(("a", "b")), out_specs=P(("a", "b")))
    def name_of_this_program(x: jax.Array) -> jax.Array:
        sums = [jax.lax.psum(x, axis) for axis in ("a", "b")[:collectives]]
        return x + sum(jax.lax.pcast(s, axis, to="varying") for s, axis in zip(sums, "ab", strict=False))

    folder = Path(jax.config.values["jax_compilation_cache_dir"])

    def programs() -> set[Path]:
        return set(folder.glob("jit_name_of_this_program-*-cache"))

    for path in programs():  # of the case before, or of a run before
        path.unlink()
    name_of_this_program.lower(jnp.ones(8)).compile()
    assert bool(programs()) == kept
