"""Models of images and text are tiled whole: the text's head and loss, with images in the batch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.models import test_torch_models as test_models
from tests.models.test_torch_models import SIZES, assert_same
from tiled_torch import tile_model, tiling_paths
from tiled_torch.models.causal_lm import MULTIMODAL
from tiled_torch.models.mlps.found import OTHER
from tiled_torch.models.tiling import FAMILIES, family_of

transformers = pytest.importorskip("transformers")

IMAGE, START, VOCAB = 39, 37, 40
TEXT = SIZES | {"vocab_size": VOCAB}
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
CLIP = TOWER | {"image_size": 8, "patch_size": 4}
QWEN = {"image_token_id": IMAGE, "video_token_id": 38, "vision_start_token_id": START, "vision_end_token_id": 36}
QWEN_TEXT = TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
QWEN_TOWER = {"depth": 1, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN_WIDE = QWEN_TOWER | {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 16}
GRID = torch.tensor([[1, 4, 4]] * 2)

# class -> (class of its configuration, what that is made of, what goes with the images)
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "Gemma3Config",
        {
            "text_config": TEXT,
            "vision_config": CLIP | {"model_type": "siglip_vision_model", "vision_use_head": False},
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
        },
        {"pixel_values": (2, 3, 8, 8), "token_type_ids": None},
    ),
    "LlavaForConditionalGeneration": (
        "LlavaConfig",
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": CLIP | {"model_type": "clip_vision_model"},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
        },
        {"pixel_values": (2, 3, 8, 8)},
    ),
    "Mistral3ForConditionalGeneration": (
        "Mistral3Config",
        {
            "text_config": TEXT | {"model_type": "mistral"},
            "vision_config": TOWER | {"model_type": "pixtral", "head_dim": 8, "image_size": 16, "patch_size": 4},
            "image_token_index": IMAGE,
            "spatial_merge_size": 2,
        },
        {"pixel_values": (2, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]] * 2)},
    ),
    "Qwen2VLForConditionalGeneration": (
        "Qwen2VLConfig",
        {
            "text_config": QWEN_TEXT,
            "vision_config": QWEN_TOWER | {"embed_dim": 16, "hidden_size": 16, "mlp_ratio": 2},
            **QWEN,
        },
        {"pixel_values": (32, 96), "image_grid_thw": GRID, "mm_token_type_ids": None},
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        "Qwen2_5_VLConfig",
        {
            "text_config": QWEN_TEXT,
            "vision_config": QWEN_WIDE | {"window_size": 16, "fullatt_block_indexes": [0]},
            **QWEN,
        },
        {"pixel_values": (32, 96), "image_grid_thw": GRID, "mm_token_type_ids": None},
    ),
    "Qwen3VLForConditionalGeneration": (
        "Qwen3VLConfig",
        {
            "text_config": QWEN_TEXT,
            "vision_config": QWEN_WIDE | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            **QWEN,
        },
        {"pixel_values": (32, 96), "image_grid_thw": GRID, "mm_token_type_ids": None},
    ),
}


def build(kind: str) -> Any:
    torch.manual_seed(0)
    config, parts, _ = KINDS[kind]
    return getattr(transformers, kind)(getattr(transformers, config)(**parts)).double()


def batch(kind: str) -> dict[str, Tensor]:
    """Two sequences of twelve tokens, four of them an image."""
    ids = torch.arange(24).reshape(2, 12) % 30 + 3
    ids[:, 1], ids[:, 2:6] = START, IMAGE
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name, given in KINDS[kind][2].items():
        if name == "pixel_values":
            found[name] = torch.rand(given, dtype=torch.float64)
        else:
            found[name] = (ids == IMAGE).int() if given is None else given
    return found


def not_zero(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without those of keys' biases where positions are not rotary: softmax takes them out again, and rounding is left."""
    whole = sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5
    zeros = [name for name in gradients if "vision_tower" in name and name.endswith("k_proj.bias")]
    assert all(float(gradients[name].norm()) <= DISTRIBUTED_FLOAT64 * whole for name in zeros)
    return {name: gradient for name, gradient in gradients.items() if name not in zeros}


@pytest.mark.parametrize("kind", KINDS)
def test_images_and_text_are_tiled_whole(kind: str) -> None:
    model, given = build(kind), batch(kind)
    labels = torch.where(given["input_ids"] == IMAGE, -100, given["input_ids"])

    def gradients(loss: Tensor) -> dict[str, Tensor]:
        named = dict(model.named_parameters())
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return {name: gradient for name, gradient in zip(named, found, strict=True) if gradient is not None}

    outputs = model(**given, labels=labels)
    logits = outputs.logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())  # transformers' own is in float32
    expected = loss.detach(), gradients(loss)
    new = model.eval().generate(**given, max_new_tokens=3, do_sample=False)
    keys, few = list(model.state_dict()), model(**given, logits_to_keep=2).logits
    tile_model(model.train(), num_shards=3)
    found = model(**given, labels=labels)
    assert type(found) is type(outputs)
    assert list(found) == list(outputs)
    assert_same((found.loss.detach(), not_zero(gradients(found.loss))), (expected[0], not_zero(expected[1])))
    assert relative_error(found.logits.detach().numpy(), logits.detach().numpy()) <= DISTRIBUTED_FLOAT64
    paths = tiling_paths(model)
    assert paths.pop("lm_head") == "tiled_linear_cross_entropy"
    # Towers have activations of their own.
    assert set(paths.values()) <= {"tiled_mlp", f"tile: {OTHER}"}
    assert {path for name, path in paths.items() if "vis" not in name} == {"tiled_mlp"}
    assert list(model.state_dict()) == keys
    assert torch.equal(model.eval().generate(**given, max_new_tokens=3, do_sample=False), new)
    assert tiling_paths(model)["lm_head"].startswith("untiled: it was called without labels")
    assert (
        relative_error(model(**given, logits_to_keep=2).logits.detach().numpy(), few.detach().numpy())
        <= DISTRIBUTED_FLOAT64
    )


def test_every_multimodal_class_is_tested() -> None:
    assert KINDS.keys() == MULTIMODAL


def test_every_class_of_every_family_is_tested() -> None:
    built = [*map(build, KINDS), *map(test_models.build, test_models.KINDS)]
    seen = {type(module).__name__ for model in built for module in model.modules() if family_of(module)}
    assert seen == set().union(*(family.classes for family in FAMILIES))
