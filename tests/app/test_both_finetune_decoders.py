"""The commands of both halves on families beside Llama: same losses, each resumes the other, transformers loads it."""

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from shared_specs.app.finetune.loop import MODEL_NAME
from shared_specs.app.models.decoders import DECODERS
from shared_specs.app.models.weights import read_model
from shared_specs.tolerances import DEMO_LOSS_RTOL
from tests.app.test_both_finetune import _programs_are_not_optimized, run  # noqa: F401  (a fixture)
from tests.asserting import assert_within
from tests.tiny_model import MISTRAL, QWEN2, write_text, write_tiny_folder
from tiled_jax.commands.finetune.trainer import JaxTrainer
from tiled_torch.commands.finetune.trainer import TorchTrainer

# Of Gemma 3 a window shorter than the context, and both types of layer.
GEMMA3 = {"model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 2}
KINDS = {"mistral": MISTRAL, "qwen2": QWEN2, "gemma3_text": GEMMA3}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    for name, changes in KINDS.items():
        write_tiny_folder(folder / name, **changes)
    write_text(folder / "text")
    return folder


@pytest.mark.deep
@pytest.mark.parametrize("model", KINDS)
def test_same_losses_and_each_half_resumes_the_other(inputs, tmp_path, model):
    plain = run(TorchTrainer, inputs, tmp_path / "plain", model, plain=True, steps=4)
    assert plain[-1] < plain[0]
    out, trainer = tmp_path / "run", JaxTrainer()
    run(TorchTrainer, inputs, out, model, num_shards=3, steps=1)
    run(lambda: trainer, inputs, out, model, num_shards=3, steps=3, resume=True)
    saved, report = AutoModelForCausalLM.from_pretrained(out / MODEL_NAME, output_loading_info=True)
    assert not any(report.values())
    assert type(saved).__name__ == DECODERS[model].causal_lm
    weights = trainer.state().weights
    assert weights.keys() == dict(saved.named_parameters()).keys()
    for name, parameter in saved.named_parameters():
        np.testing.assert_array_equal(weights[name], parameter.detach().numpy(), err_msg=name)
    assert run(TorchTrainer, inputs, out, model, num_shards=3, steps=4, resume=True) == pytest.approx(
        plain, rel=DEMO_LOSS_RTOL
    )
    expected, found = (read_model(folder / MODEL_NAME).tensors for folder in (tmp_path / "plain", out))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert_within(found[name], weight, DEMO_LOSS_RTOL, name)
