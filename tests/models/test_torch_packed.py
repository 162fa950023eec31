"""Documents packed into a sequence, by positions that restart: tiled models against transformers' own masks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shared_specs.tolerances import DISTRIBUTED_FLOAT64, MODEL_FLOAT32
from tests.core.torch_counting import LiveBytes
from tests.models.torch_decoders import BATCH, VOCAB, decoder
from tiled_torch import tile_model, tiling_paths
from tiled_torch.models.attention import SDPA

LENGTH = 14
STARTS = [[0, 5], [0, 1, 8], [0], [0, 12, 13]]


def packed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions, and labels of which those behind a seam are not yet masked."""
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(7))
    positions = torch.arange(LENGTH).repeat(BATCH, 1)
    for row, starts in zip(positions, STARTS, strict=True):
        for start in starts:
            row[start:] = torch.arange(LENGTH - start)
    return ids, positions, ids.clone()


def run(model: Any, *, checkpointing: bool = False) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids, positions, labels = packed()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    loss = model(input_ids=ids, position_ids=positions, labels=labels, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def expected(kind: str, **changes: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = decoder(kind, **changes)
    ids, positions, labels = packed()
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert model.config._attn_implementation == "sdpa"
    labels = labels.masked_fill(positions == 0, -100)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("scope", ["mlp", "block"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_equals_the_untiled_model(kind: str, scope: Any, checkpointing: bool) -> None:
    changes = {"num_key_value_heads": 2} | ({"sliding_window": 4} if kind == "mistral" else {})
    loss, gradients = expected(kind, **changes)
    model = tile_model(decoder(kind, **changes), scope=scope, num_shards=3)
    found, ours = run(model, checkpointing=checkpointing)
    assert (found - loss).abs() <= MODEL_FLOAT32 * loss
    for name, gradient in gradients.items():
        assert (ours[name] - gradient).norm() <= DISTRIBUTED_FLOAT64 * gradient.norm(), name
    assert tiling_paths(model)["model.layers.0" if scope == "block" else "lm_head"].startswith("tiled")


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma", "gemma3", "smollm3"])
def test_families(kind: str) -> None:
    changes = {"sliding_window": 4} if kind == "gemma3" else {}
    _, gradients = expected(kind, **changes)
    model = tile_model(decoder(kind, **changes), num_shards=3)
    _, ours = run(model)
    assert model.config._attn_implementation == SDPA
    for name, gradient in gradients.items():
        assert (ours[name] - gradient).norm() <= MODEL_FLOAT32 * gradient.norm(), name


@pytest.mark.parametrize("scope", ["mlp", "block"])
def test_no_mask_of_all_tokens(scope: Any) -> None:
    """256 tokens in four documents: a mask would have 256 x 256 elements. Other calls have transformers' masks."""
    model = tile_model(decoder("llama", num_hidden_layers=1), scope=scope, num_shards=3).eval()
    ids = torch.randint(0, VOCAB, (1, 256))
    before = model(input_ids=ids, attention_mask=(torch.arange(256) > 9)[None].long()).logits
    with LiveBytes() as live:
        model(input_ids=ids, position_ids=(torch.arange(256) % 64)[None], labels=ids).loss.backward()
    assert live.largest < 256 * 256
    assert model.config._attn_implementation == SDPA
    after = model(input_ids=ids, attention_mask=(torch.arange(256) > 9)[None].long()).logits
    assert torch.equal(after, before)
    tokens = model.generate(ids[:, :5], max_new_tokens=3, do_sample=False)
    plain = decoder("llama", num_hidden_layers=1).eval().generate(ids[:, :5], max_new_tokens=3, do_sample=False)
    assert torch.equal(tokens, plain)


def test_a_padded_batch_has_no_seams() -> None:
    """Its mask says what belongs together, whatever its positions are."""
    ids, positions, labels = packed()
    mask = torch.ones_like(ids)
    mask[:, -2:] = 0
    model, plain = tile_model(decoder(), num_shards=2), decoder()
    found = model(input_ids=ids, position_ids=positions, attention_mask=mask, labels=labels).loss
    truth = plain(input_ids=ids, position_ids=positions, attention_mask=mask, labels=labels).loss
    assert (found - truth).abs() <= MODEL_FLOAT32 * truth


POSITIONS = {
    "steps of two": torch.arange(LENGTH) * 2,
    "a jump, as in PoSE": torch.cat([torch.arange(5), torch.arange(LENGTH - 5) + 100]),
    "one position": torch.full((LENGTH,), 3),
}


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS.keys())
def test_positions_that_do_not_restart_take_no_label_away(positions: torch.Tensor) -> None:
    """Attention separates what transformers separates; the loss was 0 at steps of two."""
    ids, _, labels = packed()
    given = {"input_ids": ids, "position_ids": positions.expand(BATCH, -1), "labels": labels, "use_cache": False}
    truth = decoder()(**given).loss
    found = tile_model(decoder(), num_shards=2)(**given).loss
    assert (found - truth).abs() <= MODEL_FLOAT32 * truth


def test_where_no_label_is_left_a_warning_says_so() -> None:
    ids, positions, labels = packed()
    model = tile_model(decoder(), num_shards=2)
    with pytest.warns(UserWarning, match=r"^tile_model: the loss of LlamaForCausalLM is 0: every label looks across"):
        found = model(input_ids=ids, position_ids=torch.arange(LENGTH).flip(0).expand(BATCH, -1), labels=labels)
    assert found.loss == 0
    model(input_ids=ids, position_ids=positions, labels=labels)
