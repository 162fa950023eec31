"""Peak memory of a stretch of work, with the kernel's own counter and without it."""

import numpy as np
import pytest

from shared_specs.app import memory
from shared_specs.app.memory import PeakMemory

BLOCK = 128 * 2**20


def touch(size):
    return np.ones(size, np.uint8)


@pytest.mark.parametrize("kernel", [True, False])
def test_sees_memory_that_is_gone_again(monkeypatch, tmp_path, kernel):
    if kernel and not memory._CLEAR.exists():
        pytest.skip("this system does not let the peak be reset")
    if not kernel:
        monkeypatch.setattr(memory, "_CLEAR", tmp_path / "missing" / "clear_refs")
    with PeakMemory() as before:
        pass
    with PeakMemory() as peak:
        held = touch(BLOCK)
        if not kernel:
            memory.threading.Event().wait(0.1)
        del held
    with PeakMemory() as after:
        pass
    assert peak.exact is kernel
    assert 0.9 * BLOCK < peak.bytes - before.bytes < 1.5 * BLOCK
    assert after.bytes - before.bytes < BLOCK / 2


def test_ends_when_the_work_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "missing" / "clear_refs")
    with pytest.raises(ZeroDivisionError), PeakMemory() as peak:
        _ = 1 / 0
    assert not peak._sampler.is_alive()
