"""A test that starts processes is run once more when it fails: a busy machine may refuse it a port, a process or the time.

The closing lines count such second tries and name them ("RERUN"), and so does .ci/run. A test that is found there is mended.
Tests without processes have one try, as everything has that is run with `-p no:rerunfailures`.
"""

import inspect
from types import ModuleType

import pytest

# What a test file uses that starts processes.
STARTERS = {
    "multiprocessing",
    "shared_specs.app.gpu.supervisor",
    "subprocess",
    "tests.core.jax_compiling",
    "tests.installed",
    "tests.launched",
    "tests.ranks",
}
# A fixture or a marker that says so.
FIXTURES = {"pools"}
MARKER = "ranks"


def uses(module: ModuleType) -> set[str]:
    """Names of the modules that a test file has imported, or has functions and classes of."""
    values = vars(module).values()
    return {value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", "") or "" for value in values}


def starts_processes(item: pytest.Item) -> bool:
    """Whether a test starts processes, or devices that wait for each other, as far as its file tells."""
    if item.get_closest_marker(MARKER) or FIXTURES & set(getattr(item, "fixturenames", ())):
        return True
    return isinstance(item, pytest.Function) and item.module is not None and bool(STARTERS & uses(item.module))


def add_second_tries(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that have a second try."""
    if config.pluginmanager.hasplugin("rerunfailures"):
        for item in filter(starts_processes, items):
            item.add_marker(pytest.mark.flaky(reruns=1))
