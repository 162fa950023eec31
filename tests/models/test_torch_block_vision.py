"""`tile_model(scope="block")` of models of images and text whose rotary positions have three rows: Qwen2-VL and later ones."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe

from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import limit
from tests.models import test_torch_multimodal as images
from tests.models.test_torch_block import layer_paths
from tests.models.test_torch_models import assert_same
from tests.models.torch_decoders import exact
from tiled_torch import tile_model, tiling_paths, untile_model
from tiled_torch.models.block.layer import TiledBlock, TiledNorm

DENSE = [kind for kind in images.KINDS if kind.startswith("Qwen")]
MIXTURE = "Qwen3VLMoeForConditionalGeneration"
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


def build(kind: str) -> Any:
    """A small model whose parameters are all unlike one another."""
    if kind == MIXTURE:
        _, parts, _ = images.KINDS["Qwen3VLForConditionalGeneration"]
        config = transformers.Qwen3VLMoeConfig(**parts | {"text_config": images.QWEN_TEXT | SPARSE})
        torch.manual_seed(0)
        model = transformers.Qwen3VLMoeForConditionalGeneration._from_config(config, experts_implementation="eager")
    else:
        model = images.build(kind)
    model = exact(model.double().train())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def batch(kind: str) -> dict[str, Any]:
    return images.batch(kind if kind in images.KINDS else "Qwen3VLForConditionalGeneration")


def text(**more: Any) -> dict[str, Any]:
    return {"input_ids": torch.arange(24).reshape(2, 12) % 30 + 3, **more}


def padded() -> dict[str, Any]:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    return text(attention_mask=mask)


def image_positions() -> dict[str, Any]:
    """Time, height and width of every token, as of an image of two by two behind two tokens of text."""
    rows = torch.arange(12).repeat(3, 1)
    rows[:, 2:6] = torch.tensor([[2, 2, 2, 2], [2, 2, 3, 3], [2, 3, 2, 3]])
    rows[:, 6:] -= 2
    return text(position_ids=rows[:, None].expand(3, 2, 12))


def packed() -> dict[str, Any]:
    """The same behind positions of the text alone, by which the model keeps two documents apart."""
    of_text = torch.cat([torch.arange(7), torch.arange(5)]).expand(1, 2, 12)
    return text(position_ids=torch.cat([of_text, image_positions()["position_ids"]]))


def found(model: Any, given: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of all tokens but images', in float64, and every gradient."""
    model.zero_grad()
    ids = given["input_ids"]
    labels = torch.where(ids == images.IMAGE, -100, ids)
    if any(isinstance(module, TiledBlock) for module in model.modules()):
        loss = model(**given, labels=labels, use_cache=False).loss
    else:
        logits = model(**given, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.deep_but(3)
@pytest.mark.parametrize("kind", [*DENSE, MIXTURE])
def test_images_padding_and_rows_of_positions(kind: str) -> None:
    """Loss and every gradient, the tower's too; the tower, the head and the last norm run as with scope="mlp"."""
    model = build(kind)
    every = [batch(kind), text(), padded(), image_positions(), packed()]
    expected = [found(model, given) for given in every]
    assert any("visual" in name for name in expected[0][1])
    of_text, of_image = (expected[at][0] for at in (1, 3))
    assert relative_error(of_image.numpy(), of_text.numpy()) > limit(0.0, "float32")  # of the same tokens
    of_mlps = tiling_paths(tile_model(model))
    tile_model(model, scope="block", num_shards=3)
    for given, wanted in zip(every, expected, strict=True):
        assert_same(found(model, given), wanted)
        assert layer_paths(model) == {"tiled_block"}
    paths = tiling_paths(model)
    assert {name: path for name, path in paths.items() if "language_model" not in name} == {
        name: path for name, path in of_mlps.items() if "language_model" not in name
    }
    assert sum(isinstance(module, TiledNorm) for module in model.modules()) == 1


@pytest.mark.parametrize("given", [text, image_positions])
@pytest.mark.parametrize("of_experts", [False, True])
def test_text_of_omni_models(of_experts: bool, given: Any) -> None:
    """Of Qwen2.5-Omni's and Qwen3-Omni's thinkers, whose losses are their own."""
    torch.manual_seed(0)
    if of_experts:
        config = modeling_qwen3_omni_moe.Qwen3OmniMoeTextConfig(**images.QWEN_TEXT | SPARSE)
        config._experts_implementation = "eager"
        model: Any = modeling_qwen3_omni_moe.Qwen3OmniMoeThinkerTextModel(config)
    else:
        model = modeling_qwen2_5_omni.Qwen2_5OmniThinkerTextModel(
            modeling_qwen2_5_omni.Qwen2_5OmniTextConfig(**images.QWEN_TEXT)
        )
    model = exact(model.double().train())
    every = []
    for _ in range(2):
        model.zero_grad()
        y = model(**given(), use_cache=False).last_hidden_state
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
        every.append((y.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
        tile_model(model, scope="block", num_shards=3)
    assert_same(*reversed(every))
    assert layer_paths(model) == {"tiled_block"}


@pytest.mark.deep_but(2)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", DENSE)
def test_under_the_models_own_checkpointing(kind: str, offload: bool) -> None:
    """The tower is checkpointed as it would be; a layer of the text is its own checkpoint, whose input may wait on the host.

    The tower's cannot here, where no memory can be pinned.
    """
    model, given = build(kind), batch(kind)
    expected = found(model, given)
    tile_model(model, scope="block", num_shards=3)
    model.activation_checkpointing_enable({"use_reentrant": False})
    if offload:
        model.model.language_model.activation_checkpointing_enable({"use_reentrant": False}, offload=True)
    assert_same(found(model, given), expected)
    assert layer_paths(model) == {"tiled_block"}


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("kind", [*DENSE, MIXTURE])
def test_untiled_again_and_generation(kind: str) -> None:
    model, given = build(kind).eval(), batch(kind)
    classes = [type(module) for module in model.modules()]
    expected = model.generate(**given, max_new_tokens=3, do_sample=False)
    tile_model(model, scope="block", num_shards=2)
    assert torch.equal(model.generate(**given, max_new_tokens=3, do_sample=False), expected)
    assert [type(module) for module in untile_model(model).modules()] == classes


@pytest.mark.parametrize("kind", [*DENSE[:1], *DENSE[2:]])
def test_dropout_of_attention(kind: str) -> None:
    """The same random numbers in forward and in backward."""
    model = build(kind)
    for layer in model.model.language_model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.set_attn_implementation("eager")
    every = []
    for _ in range(2):
        torch.manual_seed(4)
        every.append(found(model, text()))
        tile_model(model, scope="block", num_shards=3)
    assert_same(*reversed(every))
    assert layer_paths(model) == {"tiled_block"}
