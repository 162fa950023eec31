"""The JAX command on a mesh against the PyTorch command: same losses, and each continues what the other began."""

import pytest

from shared_specs.tolerances import DEMO_LOSS_RTOL
from tests.parity.test_finetune import inputs, run  # noqa: F401  (a fixture)
from tiled_jax.commands.finetune import JaxTrainer
from tiled_torch.commands.finetune import TorchTrainer

pytestmark = pytest.mark.ranks
MESH = {"dp": 2, "fsdp": 2, "tp": 2}


def test_a_mesh_and_pytorch(inputs, tmp_path):  # noqa: F811
    shared = {"batch": 4, "tokens": 24, "steps": 3, "num_shards": 3}
    torch = run(TorchTrainer, inputs, tmp_path / "torch", **shared)
    changes = shared | {"steps": 2}
    run(JaxTrainer, inputs, tmp_path / "mesh", **changes, **MESH)
    mixed = run(TorchTrainer, inputs, tmp_path / "mesh", **shared, resume=True)
    assert mixed == pytest.approx(torch, rel=DEMO_LOSS_RTOL)
    run(TorchTrainer, inputs, tmp_path / "back", **shared | {"steps": 1})
    mixed = run(JaxTrainer, inputs, tmp_path / "back", **shared, **MESH, resume=True)
    assert mixed == pytest.approx(torch, rel=DEMO_LOSS_RTOL)
