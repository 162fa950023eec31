"""`finetune` on conversations, packed documents and in micro-batches: the same losses in both halves, and after a resume."""

from typing import Any

import numpy as np
import pytest

from shared_specs.app.data.batches import IGNORED, Batch
from shared_specs.app.options import FinetuneOptions
from shared_specs.tolerances import DEMO_LOSS_RTOL, MODEL_FLOAT32
from tests.app.test_both_finetune import _programs_are_not_optimized, run  # noqa: F401  (a fixture)
from tests.tiny_model import tiny_config, tiny_weights, write_chat, write_text
from tiled_jax.commands.finetune.trainer import JaxTrainer
from tiled_torch.commands.finetune.trainer import TorchTrainer

HALVES = [TorchTrainer, JaxTrainer]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = write_chat(tmp_path_factory.mktemp("inputs"))
    write_text(folder / "words")
    words = (folder / "words").read_text().split()
    (folder / "text").write_text("\n\n".join(" ".join(words[n : n + n % 23 + 1]) for n in range(0, 1000, 11)))
    return folder


def chat(inputs, **changes: Any) -> dict[str, Any]:
    return {"text": None, "chat": str(inputs / "chat"), "tokens": 64, "num_shards": 3, "steps": 4} | changes


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """Losses on conversations, four in a step and none in parts."""
    found = run(TorchTrainer, inputs, tmp_path_factory.mktemp("whole") / "run", **chat(inputs, batch=4))
    assert found[-1] < found[0]
    return found


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("trainer", HALVES)
def test_micro_batches_of_conversations(inputs, whole, tmp_path, trainer):
    """The mean over what the assistant says in all of them, which is more in some than in others; also after a resume."""
    parts = chat(inputs, batch=1, grad_accumulation=4)
    begun = run(trainer, inputs, tmp_path / "run", **parts | {"steps": 2})
    found = run(trainer, inputs, tmp_path / "run", **parts, resume=True)
    assert found[:2] == begun
    assert found == pytest.approx(whole, rel=DEMO_LOSS_RTOL)


def test_packed_documents(inputs, tmp_path):
    options = {"pack": True, "tokens": 48, "steps": 3}
    plain = run(TorchTrainer, inputs, tmp_path / "plain", **options, plain=True)
    for trainer in HALVES:
        out = tmp_path / trainer.__name__
        run(trainer, inputs, out, **options | {"steps": 1}, num_shards=3)
        assert run(trainer, inputs, out, **options, num_shards=3, resume=True) == pytest.approx(
            plain, rel=DEMO_LOSS_RTOL
        )


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("scope", ["mlp", "block"])
@pytest.mark.parametrize("trainer", HALVES)
def test_a_document_in_a_row_has_the_loss_it_has_alone(trainer, scope):
    random, lengths = np.random.default_rng(0), (9, 4, 11)
    alone = Batch(input_ids=np.zeros((3, 11), np.int32), shift_labels=np.full((3, 11), IGNORED, np.int32))
    for row, n in enumerate(lengths):
        alone.input_ids[row, :n] = ids = random.integers(0, 272, n)
        alone.shift_labels[row, : n - 1] = ids[1:]
    own = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])[None]
    together = {
        name: np.concatenate([a[r, :n] for r, n in enumerate(lengths)])[None] for name, a in alone.arrays().items()
    }
    expected = loss_of(trainer, scope, alone)
    assert loss_of(trainer, scope, Batch(**together, position_ids=own)) == pytest.approx(expected, rel=MODEL_FLOAT32)
    one = np.arange(24, dtype=np.int32)[None]
    assert loss_of(trainer, scope, Batch(**together, position_ids=one)) != pytest.approx(expected, rel=MODEL_FLOAT32)


def loss_of(trainer, scope, batch):
    made, shape = trainer(), batch.input_ids.shape
    options = FinetuneOptions(batch=shape[0], tokens=shape[1], scope=scope, num_shards=2, device="cpu")
    made.load(tiny_config(), tiny_weights(tiny_config()), options)
    return made.step(batch)
