"""The JAX command on a mesh against the PyTorch command: same losses, and each continues what the other began."""

import pytest

from shared_specs.tolerances import DEMO_LOSS_RTOL
from tests.app.test_both_finetune import _programs_are_not_optimized, inputs, run  # noqa: F401  (fixtures)
from tiled_jax.commands.finetune.trainer import JaxTrainer
from tiled_torch.commands.finetune.trainer import TorchTrainer

pytestmark = pytest.mark.ranks


@pytest.mark.deep
@pytest.mark.parametrize(
    "mesh",
    [{"fsdp": 2, "cp": 2, "tp": 2}, pytest.param({"dp": 2, "fsdp": 2, "tp": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_mesh_and_pytorch(inputs, tmp_path, mesh):  # noqa: F811
    shared = {"batch": 4, "tokens": 24, "num_shards": 3}
    torch = run(TorchTrainer, inputs, tmp_path / "torch", **shared, steps=4)
    out = tmp_path / "run"
    run(TorchTrainer, inputs, out, **shared, steps=1)
    run(JaxTrainer, inputs, out, **shared, **mesh, steps=3, resume=True)
    assert run(TorchTrainer, inputs, out, **shared, steps=4, resume=True) == pytest.approx(torch, rel=DEMO_LOSS_RTOL)
