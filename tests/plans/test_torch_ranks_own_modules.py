"""`parallelize` of `TiledMLP`, `TiledLinear` and `TiledLinearCrossEntropy`: every engine, the gradients of one process."""

import pytest

from shared_specs.tolerances import DISTRIBUTED_FLOAT64

pytestmark = pytest.mark.ranks

ONE_AXIS = ["tp", "sp", "sp, full", "fsdp", "fsdp, always", "fsdp, pipeline", "fsdp, offload", "ddp"]
TWO_AXES = ["hsdp", "fsdp x tp", "fsdp x sp"]


WITHOUT_TILED_LINEAR = {"tp", "sp", "sp, full", "fsdp x tp", "fsdp x sp"}  # its plan has no tensor parallelism


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(("world", "names"), [(2, ONE_AXIS), (4, TWO_AXES)], ids=["two", "four"])
def test_gradients(pools, world, names):
    expected = {f"{kind} {name}" for kind in ("mlp", "head") for name in names}
    expected |= {f"linear {name}" for name in names if name not in WITHOUT_TILED_LINEAR}
    for found in pools[world].run("tests.plans.ranks_torch_own_modules:modules", names=names):
        assert set(found) == expected
        assert max(found.values()) <= DISTRIBUTED_FLOAT64, found


def test_tensor_parallelism_of_tiles_is_refused(pools):
    message = "parallelize: config.tensor must be None for a model whose plan has no styles, got TensorParallel."
    for found in pools[2].run("tests.plans.ranks_torch_own_modules:refused"):
        assert found.startswith(message)
