"""`AutoTiledModelForCausalLM`: one line instead of two."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shared_specs import SpecError, UnsupportedError
from tests.models.supported import IDS, LABELS, build
from tiled_torch import AutoTiledModelForCausalLM, tile_model, tiling_paths

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_folder_becomes_a_tiled_model(kind: str, tmp_path: Path) -> None:
    build(kind).save_pretrained(tmp_path)
    expected = tile_model(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64), num_shards=3
    )
    model: Any = AutoTiledModelForCausalLM.from_pretrained(tmp_path, num_shards=3, keep=0.5, dtype=torch.float64)
    assert model.dtype == torch.float64
    assert model._tiling.num_shards == 3
    assert tiling_paths(model) == tiling_paths(expected)
    assert type(model) is type(expected)
    mlp: Any = next(module for module in model.modules() if type(module).__name__.endswith("MLP"))
    assert mlp._tiling.keep == 0.5
    assert torch.equal(model(input_ids=IDS, labels=LABELS).loss, expected(input_ids=IDS, labels=LABELS).loss)


def test_what_loading_tells_comes_beside_the_model(tmp_path: Path) -> None:
    build("gpt2").save_pretrained(tmp_path)
    model, told = AutoTiledModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert "missing_keys" in told
    assert tiling_paths(model)["lm_head"] == "tiled_linear_cross_entropy"


def test_a_configuration_becomes_a_tiled_model() -> None:
    config = build("stablelm").config
    model = AutoTiledModelForCausalLM.from_config(config, num_shards=2, strict=True, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert set(tiling_paths(model).values()) == {"tiled_mlp", "tiled_linear_cross_entropy"}


def test_what_tile_model_refuses_is_refused() -> None:
    with pytest.raises(SpecError, match="tile_model: num_shards must be >= 1, got 0"):
        AutoTiledModelForCausalLM.from_config(build("gpt2").config, num_shards=0)
    for wrong, text in (
        ({"num_shards": 0}, "num_shards must be >= 1"),
        ({"strict": 1}, "strict must be True or False"),
    ):
        with pytest.raises((SpecError, TypeError), match=f"^tile_model: {text}"):  # before there is a model
            AutoTiledModelForCausalLM.from_pretrained("/nowhere", **wrong)
    with pytest.raises(UnsupportedError, match="tiled as a whole with strict=True"):
        AutoTiledModelForCausalLM.from_config(build("prophetnet").config, strict=True)
    with pytest.raises(TypeError, match=r"^AutoTiledModelForCausalLM: a model is made by from_pretrained"):
        AutoTiledModelForCausalLM()
