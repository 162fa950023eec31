"""`python -m tiled_torch finetune` on GPUs: the losses of a CPU, alone and as one process for each GPU over NCCL."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
for _package in ("transformers", "gguf", "tokenizers", "safetensors"):
    pytest.importorskip(_package)

from shared_specs.app.finetune.log import read_log, step_records  # noqa: E402
from shared_specs.tolerances import DEMO_LOSS_RTOL  # noqa: E402
from tests.tiny_model import write_inputs  # noqa: E402

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def losses(inputs, name, *options, launcher=()):
    """Of a run on the command line."""
    given = ["--model", inputs / "model", "--text", inputs / "text", "--out", inputs / name, "--tokens", 48]
    given += ["--batch", 4, "--steps", 4, "--lr", 1e-3, "--num-shards", 3, *options]
    command = [sys.executable, *launcher, "-m", "tiled_torch", "finetune", *map(str, given)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return [record["loss"] for record in step_records(read_log(inputs / name))]


def require_gpus(count):
    if not torch.cuda.is_available():
        pytest.fail("this test needs a GPU that PyTorch sees")
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, and there is {torch.cuda.device_count()}")


def test_one_gpu_has_the_losses_of_a_cpu(inputs):
    require_gpus(1)
    expected = losses(inputs, "cpu", "--device", "cpu")
    assert losses(inputs, "gpu", "--device", "gpu") == pytest.approx(expected, rel=DEMO_LOSS_RTOL)
    with_checkpointing = losses(inputs, "again", "--device", "gpu", "--checkpointing")
    assert with_checkpointing == pytest.approx(expected, rel=DEMO_LOSS_RTOL)


@pytest.mark.parametrize("axis", ["--fsdp", "--dp", "--tp", "--cp"])
def test_two_gpus(inputs, axis):
    require_gpus(2)
    expected = losses(inputs, f"cpu{axis}", "--device", "cpu")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    found = losses(inputs, f"gpus{axis}", "--device", "gpu", axis, "2", launcher=launcher)
    assert found == pytest.approx(expected, rel=DEMO_LOSS_RTOL)
