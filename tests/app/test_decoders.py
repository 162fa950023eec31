"""The kinds of decoder that `finetune` takes: what their configurations mean, where their biases are, what is refused."""

import json

import numpy as np
import pytest

from shared_specs.app.models.decoders import DECODERS, sliding_window
from shared_specs.app.models.model_config import (
    check_context,
    complete_config,
    saved_config,
    scale_positions,
    weight_shapes,
)
from shared_specs.app.models.weights import read_model
from shared_specs.app.options import InputError
from tests.tiny_model import CONFIG, MISTRAL, QWEN2, tiny_config, tiny_tokenizer, tiny_weights, write_tiny_folder

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize("kind", [MISTRAL, QWEN2], ids=["mistral", "qwen2"])
def test_a_folder_keeps_its_kind(tmp_path, kind):
    files = read_model(write_tiny_folder(tmp_path / "model", **kind))
    expected = tiny_weights(tiny_config(**kind))
    assert files.tensors.keys() == expected.keys()
    for name, array in files.tensors.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    assert raw["model_type"] == files.config["model_type"] == kind["model_type"]
    assert raw["architectures"] == [DECODERS[kind["model_type"]].causal_lm]
    again = complete_config(raw, "saved")
    assert {key: again[key] for key in files.config} == files.config == tiny_config(**kind) | again
    assert files.tokenizer.encode("on 42").tolist() == tiny_tokenizer().encode("on 42").tolist()


@pytest.mark.parametrize(
    ("changes", "biased"),
    [
        ({}, ""),
        ({"attention_bias": True}, "qkvo"),
        (QWEN2, "qkv"),
        (QWEN2 | {"attention_bias": True}, "qkv"),  # no term of that kind: its class does not read it
        (MISTRAL | {"attention_bias": True, "mlp_bias": True}, ""),
    ],
    ids=["llama", "llama-biases", "qwen2", "qwen2-bias", "mistral-biases"],
)
def test_which_projections_have_biases(changes, biased):
    shapes = weight_shapes(tiny_config(**changes))
    found = {name for name in shapes if name.startswith("model.layers.1.") and name.endswith(".bias")}
    assert found == {f"model.layers.1.self_attn.{name}_proj.bias" for name in biased}
    assert all(shapes[name] == shapes[name.replace("bias", "weight")][:1] for name in found)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 8}, None),  # Llama reads no such term
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": 8}, 8),
        ({"model_type": "qwen2", "sliding_window": 8}, None),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}, None),  # 28 layers are without
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, 8),
        ({"model_type": "qwen2", "sliding_window": None, "use_sliding_window": True, "max_window_layers": 1}, None),
        (
            {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}
            | {"layer_types": ["full_attention", "sliding_attention"]},
            8,
        ),
    ],
    ids=str,
)
def test_windows(changes, window):
    config = tiny_config(**changes)
    assert sliding_window(config) == window
    assert sliding_window(complete_config(saved_config(config), "saved")) == window
    check_context(config, 64)


REFUSED = {
    "sliding_window must be a whole number >= 1, got 0": MISTRAL | {"sliding_window": 0},
    "decoder_sparse_step must be 1, the value that both halves train with, got 2": {
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 2,
    },
    r"has mlp_only_layers \[1\], which neither half trains with. Set it to \[\] in config.json": {
        "model_type": "qwen3_moe",
        "mlp_only_layers": [1],
    },
    "num_experts_per_tok must be <= num_experts, 4, got 8": {"model_type": "qwen3_moe", "num_local_experts": 4},
    "use_sliding_window must be true or false, got 1": QWEN2 | {"use_sliding_window": 1},
    "max_window_layers must be a whole number, got 'all'": QWEN2 | {"max_window_layers": "all"},
    r"layer_types must be a list of full_attention, got \['sliding_attention'\]": QWEN2
    | {"layer_types": ["sliding_attention"]},
    "layer_types must be a list of full_attention and sliding_attention, got 'full_attention'": QWEN2
    | {"layer_types": "full_attention", "use_sliding_window": True},
    r"must be a Llama-style .* \(model_type llama, mistral, qwen2, .* or qwen3_moe\), got falcon \(here\)": {
        "model_type": "falcon"
    },
    r"must be a Llama-style .* got \['llama'\]": {"model_type": ["llama"]},
    r"must be a Llama-style .* got LlamaForCausalLM": QWEN2 | {"architectures": ["LlamaForCausalLM"]},
    "rope_type of its rotary positions must be one of default, linear, llama3, yarn, longrope, got 'dynamic'": {
        "rope_scaling": {"type": "dynamic", "factor": 2.0}
    },
    r"rope_type of its rotary positions must be one of .*, got \['yarn'\]": {"rope_scaling": {"rope_type": ["yarn"]}},
    "low_freq_factor of its rotary positions must be a number > 0, got None": {
        "rope_scaling": {"rope_type": "llama3", "factor": 2.0}
    },
    "factor of its rotary positions must be a number > 0, got None": {"rope_scaling": {"rope_type": "yarn"}},
    "partial_rotary_factor of its rotary positions must be 1 or left out, got 0.5": {"partial_rotary_factor": 0.5},
    r"partial_rotary_factor of .* must be 1 or left out, got 0\.25": {
        "rope_parameters": {"partial_rotary_factor": 0.25}
    },
    "beta_fast of its rotary positions must be a number, got '32'": {"rope_scaling": YARN | {"beta_fast": "32"}},
    "original_max_position_embeddings of its rotary positions must be a number > 0, got 0": {
        "rope_scaling": YARN | {"original_max_position_embeddings": 0}
    },
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused(words):
    with pytest.raises(InputError, match=f"^finetune: --model .*{words}") as caught:
        complete_config(CONFIG | REFUSED[words], "here")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "outside", "original"),
    [
        (YARN, {}, 64),
        (YARN | {"original_max_position_embeddings": 16}, {}, 16),
        (YARN | {"original_max_position_embeddings": 16}, {"original_max_position_embeddings": 32}, 32),
        (LLAMA3, {}, 64),
    ],
    ids=str,
)
def test_positions_before_they_were_scaled(given, outside, original):
    config = tiny_config(rope_scaling=given, **outside)
    assert config["rope_parameters"]["original_max_position_embeddings"] == original
    assert complete_config(saved_config(config), "saved")["rope_parameters"] == config["rope_parameters"]


@pytest.mark.parametrize("place", [{}, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": None}}])
def test_all_of_a_head_turns_where_nothing_is_said_of_it(place):
    config = tiny_config(**place, partial_rotary_factor=None)
    assert "partial_rotary_factor" not in config["rope_parameters"]
    with pytest.raises(InputError, match=r"partial_rotary_factor .* must be 1 or left out, got 0\.5\."):
        tiny_config(**place, partial_rotary_factor=0.5)


def test_context_of_positions_that_are_scaled_already():
    """Configurations with yarn give the positions before or after it."""
    for changes, reach in (({}, 256), ({"original_max_position_embeddings": 16}, 64)):
        config = tiny_config(rope_scaling=YARN | changes)
        check_context(config, reach)
        with pytest.raises(InputError, match=rf"--tokens must be <= {reach}, .*, got {reach + 1}\. They are scaled"):
            check_context(config, reach + 1)
    for scaling in (YARN, LLAMA3):
        config = tiny_config(rope_scaling=scaling)
        with pytest.raises(InputError, match=r"--rope-scale must be left out for a model with rope_type"):
            scale_positions(config, 2.0)
        assert scale_positions(config, None) is config
