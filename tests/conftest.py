"""What every test runs under: strict promotion, eight virtual JAX devices, NaN in uninitialised memory, a plain header.

A missing framework is a skip with its reason on a laptop and a failure where TILED_REQUIRE names it (CI).
"""

import gc
import importlib.metadata
import importlib.util
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.devices import has_cuda
from tests.ranks import Ranks
from tests.second_tries import add_second_tries

# A property is tried with the same examples each time, however busy the machine is.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.load_profile("suite")

FRAMEWORKS = ("torch", "jax")
REQUIRED = tuple(name for name in os.environ.get("TILED_REQUIRE", "").split(",") if name)
if unknown := set(REQUIRED) - set(FRAMEWORKS):
    raise pytest.UsageError(f"TILED_REQUIRE must name {', '.join(FRAMEWORKS)}, got {', '.join(sorted(unknown))}")


def has(framework: str) -> bool:
    """Whether a framework is installed; an error where it is required and is not."""
    found = importlib.util.find_spec(framework) is not None
    if not found and framework in REQUIRED:
        raise pytest.UsageError(f"TILED_REQUIRE names {framework}, which is not installed")
    return found


# Read when jax is first imported, so they are set before any test module is.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TILED_TUNED_BLOCKS"] = ""  # what somebody measured on this machine decides no test
# Triton decides when a kernel is defined whether a GPU or its interpreter runs it; torch may import it at any time. Who sets
# it has decided: `make gpu` says 0.
if not has_cuda():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Compiling is most of the time of JAX's tests. TILED_OPTIMIZE=1, as in make test-new-jax, does it as for users; without it
# LLVM optimizes nothing, while buffers, collectives and the order of operations stay what XLA's own passes make them.
# XLA ends the process where virtual devices wait 40 s for each other, which a machine that stalls for a while is no fault of.
XLA_FLAGS = {
    "xla_force_host_platform_device_count": "8",
    "xla_cpu_collective_call_terminate_timeout_seconds": "240",
}
if not any(map(os.environ.get, ("TILED_OPTIMIZE", "TILED_AOT"))) and not has_cuda():
    XLA_FLAGS |= {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": "true"}
    # The emitters before these compile three times faster; jax 0.11 has them no more, and ends the process at an unknown flag.
    if has("jax") and importlib.metadata.version("jaxlib").startswith("0.10."):
        XLA_FLAGS["xla_cpu_use_fusion_emitters"] = "false"
for _flag, _value in XLA_FLAGS.items():
    if _flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{_flag}={_value}".strip()

# What needs packages that .venv does not have: `make aot`, `make float8`, `make deepspeed` and `make trainers` name these
# folders, nothing else collects them.
collect_ignore = [folder for folder in ("aot", "float8", "zero") if not os.environ.get(f"TILED_{folder.upper()}")]
collect_ignore += [] if os.environ.get("TILED_TRAINERS") else ["trainers/packages"]
# Minutes of compiling that `make aot-triton` does for both versions of Triton.
collect_ignore += ["kernels/test_torch_aot.py"] if not os.environ.get("TILED_AOT_TRITON") else []
# A file says in its name which half it is of; TILED_TESTS names those to collect.
NEEDS = {"spec": (), "torch": ("torch",), "jax": ("jax",), "both": ("torch", "jax")}
KINDS = tuple(os.environ.get("TILED_TESTS", ",".join(NEEDS)).split(","))
if unknown := set(KINDS) - set(NEEDS):
    raise pytest.UsageError(f"TILED_TESTS must name {', '.join(NEEDS)}, got {', '.join(sorted(unknown))}")
COLLECTED = {kind for kind in KINDS if all(has(framework) for framework in NEEDS[kind])}
pytest_plugins = ["tests.core.jax_fixtures"] if COLLECTED & {"jax", "both"} else []


DEEP_HALF = os.environ.get("TILED_DEEP_HALF", "")
if DEEP_HALF not in ("", "0", "1"):
    raise pytest.UsageError(f"TILED_DEEP_HALF must be 0 or 1, got {DEEP_HALF}")


def half_of(nodeid: str) -> str:
    """In which half of the deep tests one is, the same in every process."""
    return str(zlib.crc32(nodeid.encode()) % 2)


def kind_of(path: Path) -> str:
    """Which half a test file is of: "torch", "jax", "both" or, of neither, "spec"."""
    kind = path.stem.removeprefix("test_").partition("_")[0]
    return kind if kind in NEEDS else "spec"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.suffix == ".py" and collection_path.stem.startswith("test_"):
        return True if kind_of(collection_path) not in COLLECTED else None
    return None


def pytest_report_header() -> list[str]:
    lines = []
    for name in (*FRAMEWORKS, "flax", "transformers"):
        found = importlib.util.find_spec(name) is not None
        version = importlib.metadata.version(name) if found else "not installed: its tests are left out"
        lines.append(f"{name}: {version}")
    return [*lines, f"TILED_REQUIRE: {','.join(REQUIRED) or 'not set'}", f"XLA_FLAGS:{os.environ['XLA_FLAGS']}"]


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Ranks]]:
    """One, two and four gloo ranks, by their number, started by the first call: processes that have imported torch once."""
    with Ranks(1) as one, Ranks(2) as two, Ranks(4) as four:
        yield {1: one, 2: two, 4: four}


@pytest.fixture(scope="module", autouse=True)
def _what_earlier_files_left_is_not_searched_for_garbage() -> None:
    """Compiled programs and modules by the million: a search took seconds each time that a library asked for one."""
    gc.collect()
    gc.freeze()


# Tracing makes objects by the million and few that are garbage: the default looks for it after each seven hundred.
gc.set_threshold(100_000, 50, 100)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # so that the interpreter's end frees them


@pytest.fixture(autouse=True)
def _nan_in_uninitialised_memory():
    """torch.empty* returns NaN, so an element that nothing wrote is seen."""
    if not has("torch"):
        yield
        return
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="module", autouse=True)
def _jax_files_share_what_was_compiled(request: pytest.FixtureRequest) -> None:
    """Asked for here: a `usefixtures` marker that is added to a test once it is collected changes nothing."""
    if kind_of(request.path) in ("jax", "both"):
        request.getfixturevalue("compiled_once_a_session")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before -m is heard, and behind what shuffles
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Of a test with `deep_but(n)` the first n cases alone are not deep; one marked `last_of_file` comes behind its whole file.
    PyTorch warns of operations on a GPU that the fixture above makes it watch. TILED_DEEP_HALF takes a half of the deep tests.
    """
    cases: Counter[str] = Counter()
    for item in items:
        marker = item.get_closest_marker("deep_but")
        if marker and not (item.get_closest_marker("slow") or item.get_closest_marker("deep")):
            test = item.nodeid.partition("[")[0]
            cases[test] += 1
            if cases[test] > marker.args[0]:
                item.add_marker(pytest.mark.deep)
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"))
    if DEEP_HALF:
        left = {item for item in items if item.get_closest_marker("deep") and half_of(item.nodeid) != DEEP_HALF}
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]
    add_second_tries(config, items)
    yield
    for last in [item for item in items if item.get_closest_marker("last_of_file")]:
        items.remove(last)
        others = [i for i, item in enumerate(items) if item.path == last.path]
        items.insert(others[-1] + 1 if others else len(items), last)
