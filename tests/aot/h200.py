"""An H200 as JAX's compiler sees it: the target, shapes on it, compiled programs, and what their kernels need."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from tiled_jax.plan.described import TARGET as TARGET

SHARED_LIMIT = 232_448


def topology(sizes: str) -> Any:
    """Return so many H200s: hosts, GPUs of each and processes of each, such as "1x8x1"."""
    return topologies.get_topology_desc("h200", "cuda", target_config=TARGET, topology=sizes)


def _sharding() -> NamedSharding:
    return NamedSharding(topologies.make_mesh(topology("1x1x1"), (1,), ("x",)), PartitionSpec())


_ON_H200 = _sharding()
MESH = _ON_H200.mesh


def shape(dtype: Any, *dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=_ON_H200)


def compiled(fn: Callable[..., Any], *shapes: jax.ShapeDtypeStruct) -> Any:
    """The program; without a device there is nothing to tune on."""
    return jax.jit(fn).lower(*shapes).compile({"xla_gpu_autotune_level": 0})


def kernels(dump: Path, known: set[str]) -> Iterator[dict[str, Any]]:
    """What every Mosaic kernel needs that was compiled since `known` was filled; adds them to it."""
    for log in sorted(dump.glob("*.ptxas")):
        if log.name in known:
            continue
        known.add(log.name)
        text, ptx = log.read_text(), log.with_suffix(".ptx").read_text()
        resources = log.with_suffix(".resources.txt").read_text()

        def number(pattern: str, text: str = text) -> int:
            found = re.search(pattern, text)
            assert found is not None, f"ptxas says nothing of {pattern}: {text}"
            return int(found[1])

        yield {
            "registers": number(r"Used (\d+) registers"),
            "spilled_bytes": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
            "shared_bytes": number(r"smem_scratch_bytes=(\d+)", resources),
            "serialized": text.count("serialized"),  # of ptxas: products one after the other, each waited for
            "wgmma": ptx.count("wgmma.mma_async"),
            "tma": ptx.count("cp.async.bulk.tensor"),
            "target": number(r"\.target sm_(\d+)a", ptx),
            "asked_registers": asked_registers(ptx),
        }


def asked_registers(ptx: str) -> int:
    """Return the registers a thread of all warpgroups of a program together, once each has asked for its own; 0: none asks.

    One warpgroup copies, the others compute.
    """
    kept, asked = (re.findall(rf"setmaxnreg\.{kind}\.sync\.aligned\.u32 (\d+)", ptx) for kind in ("dec", "inc"))
    if not asked:
        return 0
    threads = re.search(r"\.(?:req|max)ntid (\d+)", ptx)
    assert threads is not None
    assert (len(set(kept)), len(set(asked))) == (1, 1), (kept, asked)
    return int(kept[0]) + (int(threads[1]) // 128 - 1) * int(asked[0])


def launched_registers(threads: int) -> int:
    """Return the same of a program as it is launched: of 65536, every thread as many, a multiple of 8."""
    return 65536 // threads // 8 * 8 * (threads // 128)
