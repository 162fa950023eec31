"""The PyTorch command on families beside Llama: transformers' own classes, their defaults, saved as what they are."""

import io
import json
import unicodedata

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from shared_specs.app.finetune.log import read_log, step_records
from shared_specs.app.finetune.loop import MODEL_NAME, finetune
from shared_specs.app.finetune.plain_memory import plain_step
from shared_specs.app.models.decoders import DECODERS, layer_windows, layers_turned
from shared_specs.app.models.model_config import complete_config
from shared_specs.app.models.weights import read_model
from shared_specs.app.options import FinetuneOptions
from shared_specs.errors import UnsupportedError
from shared_specs.tolerances import DEMO_LOSS_RTOL
from tests.app.test_torch_finetune import compare_with_transformers, loaded, windows
from tests.tiny_model import MISTRAL, MIXTRAL, QWEN2, QWEN3_MOE, write_inputs, write_tiny_folder, write_tiny_gguf
from tiled_torch.commands.finetune.trainer import TorchTrainer
from tiled_torch.models import tiling_paths

REQUIRED = {"vocab_size": 272, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 30}
YARN = {"rope_type": "yarn", "factor": 4.0}
SILENT = Console(file=io.StringIO())


GIVEN = [
    {},
    {"sliding_window": None},
    {"use_sliding_window": True, "max_window_layers": 29},
    {"rope_scaling": YARN, "original_max_position_embeddings": 512, "rope_theta": 5e5},
]


@pytest.mark.parametrize("model_type", DECODERS)
@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_missing_terms_are_those_of_transformers(model_type, given):
    if model_type == "phi3" and "rope_scaling" in given:  # which takes yarn for its own kind of scaling
        scaling = {"type": "yarn", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
        given = given | {"rope_scaling": scaling}
    raw = REQUIRED | {"num_attention_heads": 32} | given
    ours = complete_config({"model_type": model_type} | raw, "here")
    theirs = AutoConfig.for_model(model_type, **raw)
    theirs.standardize_rope_params()  # as its model does
    for name in (*raw, *DECODERS[model_type].defaults):
        if name not in ("rope_scaling", "rope_theta", "no_rope_layer_interval"):
            assert ours[name] == getattr(theirs, name), name
    turned, windows = layers_turned(ours), layer_windows(ours)
    assert turned == tuple(map(bool, getattr(theirs, "no_rope_layers", [1] * 30)))
    if hasattr(theirs, "layer_types"):
        used = [kind == "sliding_attention" and theirs.sliding_window is not None for kind in theirs.layer_types]
        assert [window is not None for window in windows] == used
    expected = theirs.rope_parameters
    if model_type == "phi3":
        expected = {name: value for name, value in expected.items() if name not in ("partial_rotary_factor", "type")}
    assert ours["rope_parameters"] == expected


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    for kind in (MISTRAL, QWEN2, MIXTRAL, QWEN3_MOE):
        write_tiny_folder(folder / kind["model_type"], **kind)
    return folder


def options(inputs, out, model, **changes):
    paths = {"model": str(inputs / model), "text": str(inputs / "text"), "out": str(out)}
    return FinetuneOptions(**paths | {"tokens": 48, "steps": 1, "lr": 1e-3, "num_shards": 3, "device": "cpu"} | changes)


@pytest.mark.parametrize("model", ["mistral", "qwen2"])
def test_the_saved_folder_is_one_of_its_own_kind(inputs, tmp_path, model):
    """After a context as long as Mistral's window."""
    out, trainer = tmp_path / "run", TorchTrainer()
    finetune(trainer, options(inputs, out, model), SILENT)
    saved, report = AutoModelForCausalLM.from_pretrained(out / MODEL_NAME, output_loading_info=True)
    assert not any(report.values())
    assert type(saved).__name__ == DECODERS[model].causal_lm
    assert trainer._model.config.model_type == saved.config.model_type == model
    raw = json.loads((out / MODEL_NAME / "config.json").read_text())
    assert raw["architectures"] == [DECODERS[model].causal_lm]
    ids = torch.from_numpy(windows(shape=(1, 48))).long()
    with torch.no_grad():
        torch.testing.assert_close(saved(ids).logits, trainer._model(ids).logits, rtol=0, atol=0)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("scope", ["mlp", "block"])
@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe"])
def test_experts_train_as_untiled_ones_do(inputs, tmp_path, model, scope):
    """And have the names of the folder that they came from: each expert its own arrays, which transformers stores together."""
    untiled, out, trainer = {"plain": True, "num_shards": None, "batch": 2}, tmp_path / "run", TorchTrainer()
    finetune(TorchTrainer(), options(inputs, tmp_path / "plain", model, steps=2, **untiled), SILENT)
    finetune(trainer, options(inputs, out, model, steps=2, scope=scope, grad_accumulation=2), SILENT)
    plain, tiled = (step_records(read_log(folder)) for folder in (tmp_path / "plain", out))
    assert [step["loss"] for step in tiled] == pytest.approx([step["loss"] for step in plain], rel=DEMO_LOSS_RTOL)
    assert "untiled" not in str(tiling_paths(trainer._model))
    assert read_model(out / MODEL_NAME).tensors.keys() == read_model(inputs / model).tensors.keys()
    saved, report = AutoModelForCausalLM.from_pretrained(out / MODEL_NAME, output_loading_info=True)
    assert not any(report.values())
    for name, parameter in saved.named_parameters():
        assert torch.equal(parameter, trainer._model.get_parameter(name)), name


def test_kept_shards_of_experts_are_refused(inputs, tmp_path):
    with pytest.raises(UnsupportedError, match=r"^finetune: --keep must be 0\.0 with experts, got 0\.5\. "):
        finetune(TorchTrainer(), options(inputs, tmp_path / "run", "mixtral", keep=0.5), SILENT)
    assert not (tmp_path / "run").exists()


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe"])
def test_experts_resume_with_their_moments(inputs, tmp_path, model):
    whole = TorchTrainer()
    finetune(whole, options(inputs, tmp_path / "whole", model, steps=3), SILENT)
    finetune(TorchTrainer(), options(inputs, tmp_path / "run", model, steps=2), SILENT)
    resumed = TorchTrainer()
    finetune(resumed, options(inputs, tmp_path / "run", model, steps=3, resume=True), SILENT)
    state, expected = resumed.state(), whole.state()
    assert state.optimizer.keys() == expected.optimizer.keys()
    for arrays, theirs in ((state.weights, expected.weights), (state.optimizer, expected.optimizer)):
        for name, array in theirs.items():
            np.testing.assert_array_equal(arrays[name], array, err_msg=name)


KINDS = {"mistral": MISTRAL, "qwen2": QWEN2, "mixtral": MIXTRAL, "qwen3_moe": QWEN3_MOE}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_weights_are_predicted(inputs, tmp_path, kind):
    trainer = loaded(options(inputs, tmp_path / "run", kind["model_type"]), **kind)
    config = read_model(inputs / kind["model_type"]).config
    assert plain_step(config, 48).weights == sum(parameter.nbytes for parameter in trainer._model.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_qwen2_gguf_reads_as_transformers_reads_it(tmp_path, tied):
    file = write_tiny_gguf(tmp_path / "model.gguf", **QWEN2, tie_word_embeddings=tied)
    compare_with_transformers(file)
    ours, theirs = read_model(file).tokenizer, AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    text = "the sun's on 421 tiles\n\n  über <|end|>it"
    assert ours.encode(text).tolist() == theirs(text).input_ids
    # The model's own tokenizer composes accents first, which transformers forgets when it reads a GGUF file.
    assert ours.encode(unicodedata.normalize("NFD", text)).tolist() == ours.encode(text).tolist()
