"""What runs, measures and compares variants of JAX in a worker of `bench --device gpu`."""

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import jax
import jax.numpy as jnp

from shared_specs.app.bench.bench import host_seconds
from shared_specs.app.gpu.worker import Variant

# Elements that a comparison widens at a time.
_BLOCK = 2**27
# A row whose norm is below this part of the average one's is measured against that part: its own digits have cancelled.
_SMALL_ROW = 1 / 64


class Program:
    """A run of a jitted function that waits for the results; compiled when it runs first, so that a refusal is its own.

    It keeps what is compiled, which JAX's caches may then forget.

    over: the arguments whose memory results take, as in the loop over shards. Every launch gets copies of its own.
    launches: how many are timed one behind the other, so that the device does not wait for the host in between.
    names: of the results, in order.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *arguments: Any,
        over: Sequence[int] = (),
        launches: int = 1,
        names: Sequence[str] | None = None,
    ) -> None:
        self.fn = fn
        self._jitted = jax.jit(fn, donate_argnums=tuple(over))
        self._compiled: Any = None
        self.arguments, self.over, self._launches, self.names = arguments, tuple(over), launches, names

    def __call__(self) -> Any:
        if self._compiled is None:
            self._compiled = self._jitted.lower(*self.arguments).compile()
        return jax.block_until_ready(self._compiled(*self._own()))

    def seconds(self) -> float:
        """Return the seconds of one launch; the copies are made before the clock starts."""
        if self._compiled is None:
            self()
        own = jax.block_until_ready([self._own() for _ in range(self._launches)])
        return host_seconds(lambda: jax.block_until_ready([self._compiled(*arguments) for arguments in own][-1])) / len(
            own
        )

    def _own(self) -> list[Any]:
        return [jnp.copy(a) if i in self.over else a for i, a in enumerate(self.arguments)]

    @property
    def temp_bytes(self) -> int | None:
        """Return the bytes that the compiled program uses above its arguments and results; None where it was never compiled."""
        analysis: Any = None if self._compiled is None else self._compiled.memory_analysis()
        return None if analysis is None else analysis.temp_size_in_bytes


def variant(
    fn: Callable[..., Any],
    *arguments: Any,
    names: Sequence[str] | None,
    over: Sequence[int] = (),
    launches: int = 1,
    **facts: Any,
) -> Variant:
    """names: of what fn returns, in order; None where nothing can be compared with it."""
    program = Program(fn, *arguments, over=over, launches=launches, names=names)

    def results() -> dict[str, jax.Array]:
        found = jax.tree.leaves(program())
        return dict(zip(names or (), found, strict=True))

    return Variant(
        run=program,
        results=None if names is None else results,
        facts=lambda: {"temp_bytes": program.temp_bytes},
        **facts,
    )


class JaxDevice:
    """Seconds of a launch by the host's clock; no peak: what a compiled program uses is `temp_bytes` of its row."""

    def seconds(self, variant: Variant) -> float:
        return variant.run.seconds() if isinstance(variant.run, Program) else host_seconds(variant.run)

    def peak(self, variant: Variant) -> int | None:
        variant.run()
        return None

    def distances(
        self, found: Mapping[str, jax.Array], expected: Mapping[str, jax.Array]
    ) -> dict[str, tuple[float, float]]:
        if unknown := found.keys() - expected.keys():
            raise ValueError(f"nothing to compare {', '.join(sorted(unknown))} with")
        return {name: distance(found[name], expected[name]) for name in found}

    @contextmanager
    def poisoned(self) -> Iterator[None]:
        """Fill free memory with NaN, so that XLA's next allocations come from such memory as far as it is used again."""
        if jax.default_backend() == "gpu":
            with suppress(Exception):  # no room for it
                jax.block_until_ready(jnp.full(2**29, jnp.nan, jnp.float32))
        yield

    def healthy(self) -> bool:
        try:
            return float(jnp.ones(1).sum()) == 1.0
        except Exception:  # whatever a broken client raises
            return False

    def forget(self) -> None:
        """Drop JAX's caches of traced functions; the programs that variants hold compiled stay."""
        gc.collect()
        jax.clear_caches()


def distance(found: jax.Array, expected: jax.Array) -> tuple[float, float]:
    """Return the relative L2 distance of all elements, and of the worst row; NaN where something is not finite."""
    if found.shape != expected.shape:
        raise ValueError(f"shape {found.shape} instead of {expected.shape}")
    if not found.size:
        return 0.0, 0.0
    ours, theirs = (a.reshape(-1, a.shape[-1] if a.ndim > 1 else a.size) for a in (found, expected))
    rows = max(1, _BLOCK // ours.shape[1])
    parts = [_of_rows(ours[at : at + rows], theirs[at : at + rows]) for at in range(0, ours.shape[0], rows)]
    d, n = (jnp.concatenate(sums) for sums in zip(*parts, strict=True))
    if not float(n.sum()):
        return (math.inf, math.inf) if float(d.sum()) else (0.0, 0.0)
    whole, worst = d.sum() / n.sum(), (d / jnp.maximum(n, n.mean() * _SMALL_ROW**2)).max()
    return float(whole) ** 0.5, float(worst) ** 0.5


@jax.jit
def _of_rows(ours: jax.Array, theirs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return sums of squares of every row: of the difference and of what is right."""
    kind = jnp.float64 if theirs.dtype == jnp.float64 else jnp.float32
    a, b = ours.astype(kind), theirs.astype(kind)
    return jnp.sum(jnp.square(a - b), 1), jnp.sum(jnp.square(b), 1)


def described() -> dict[str, Any]:
    """Return what a record says of the device."""
    device = jax.devices()[0]
    return {"name": device.device_kind}
