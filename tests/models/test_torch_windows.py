"""Windows of attention in tiled models: without a mask of all pairs, and equal to transformers' own with one."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shared_specs.tolerances import MODEL_FLOAT32
from tests.core.torch_counting import LiveBytes
from tests.models.supported import exact_losses
from tests.models.tiny_configs import tiny_config, tiny_model
from tests.models.tiny_overrides import OVERRIDES
from tests.models.torch_decoders import VOCAB, decoder
from tiled_torch import tile_model, untile_model
from tiled_torch.layers.attention import causal_attention
from tiled_torch.models.attention import SDPA, WINDOWED_TYPES
from tiled_torch.models.block.known import is_block

transformers = pytest.importorskip("transformers")
WINDOW, LENGTH = 4, 14
IDS = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
# Who is drawn among experts depends on the shards of tokens; without what widens the choice there is one.
MORE = {"phimoe": {"router_jitter_noise": 0.0}}
SLIDING = ("sliding_attention", "full_attention")


def windowed(kind: str, window: int = WINDOW, **changes: Any) -> Any:
    """A tiny model of a type in float64, of a layer with a window and, where layers have kinds, one without."""
    config = tiny_config(kind, OVERRIDES.get(kind, {}) | MORE.get(kind, {}) | changes)
    config.sliding_window = window
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [SLIDING[number % 2] for number in range(config.num_hidden_layers)]
    return tiny_model(config, transformers.AutoModelForCausalLM, torch.float64).train()


def step(model: Any, ids: torch.Tensor = IDS, **given: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    torch.manual_seed(1)
    with exact_losses():
        loss = model(input_ids=ids, labels=ids, use_cache=False, **given).loss
        loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    assert (found[0] - expected[0]).abs() <= MODEL_FLOAT32 * expected[0].abs()
    assert found[1].keys() == expected[1].keys()
    whole = sum(float(g.square().sum()) for g in expected[1].values()) ** 0.5
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= MODEL_FLOAT32 * max(
            float(gradient.norm()), whole * MODEL_FLOAT32
        ), name


def largest_in_step(model: Any, tokens: int, **given: Any) -> int:
    """Bytes of the largest tensor in a step."""
    ids = torch.randint(3, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(2))
    with LiveBytes() as live:
        model(input_ids=ids, labels=ids, use_cache=False, **given).loss.backward()
    return live.largest


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of few queries, in sequences of which arrays of single tokens are smaller than those of all pairs."""
    monkeypatch.setitem(causal_attention.__kwdefaults__, "block_tokens", 16)


@pytest.mark.deep_but(6)
@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize(
    "kind", sorted(WINDOWED_TYPES, key=lambda kind: (kind not in ("gemma3_text", "mistral"), kind))
)
def test_types_that_are_known(kind: str) -> None:
    """Loss and gradients are those of the untiled model, whose window cuts; a mask of all pairs is nowhere."""
    plain = windowed(kind)
    expected = step(plain)
    assert (step(windowed(kind, window=LENGTH))[0] - expected[0]).abs() > MODEL_FLOAT32  # the window cuts
    scope: Any = "block" if any(map(is_block, plain.modules())) else "mlp"
    model = tile_model(windowed(kind), scope=scope, num_shards=3)
    assert model.config._attn_implementation == SDPA
    assert_equal(step(model), expected)
    tokens = 1536
    made = windowed(kind, max_position_embeddings=tokens)
    if kind == "gemma3_text":
        assert largest_in_step(made, tokens) >= tokens**2
    assert largest_in_step(tile_model(made, num_shards=8), tokens) < tokens**2
    assert untile_model(model).config._attn_implementation == "sdpa"
    assert_equal(step(model), expected)


def test_no_known_type_asks_for_an_implementation_by_name() -> None:
    """Code that does would take ours for one that makes no masks, or makes others."""
    for kind in WINDOWED_TYPES:
        model = transformers.CONFIG_MAPPING[kind]
        home = Path(sys.modules[model.__module__].__file__ or "").parent
        source = (home / f"modeling_{home.name}.py").read_text()
        assert "_attn_implementation ==" not in source, kind
        assert "_attn_implementation in" not in source, kind
        assert "ALL_ATTENTION_FUNCTIONS" in source, kind


@pytest.mark.parametrize("scope", ["mlp", "block"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_has_the_mask_of_transformers(side: str, scope: Any) -> None:
    changes = {"sliding_window": WINDOW}
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, slice(0, 3) if side == "left" else slice(-3, None)] = 0
    model = tile_model(decoder("mistral", **changes), scope=scope, num_shards=3)
    for given in (mask, torch.ones_like(mask), None):
        assert_equal(step(model, attention_mask=given), step(decoder("mistral", **changes), attention_mask=given))


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("window", [WINDOW, 1023, 1024])
def test_a_mask_of_ones_costs_no_mask_of_all_pairs(window: int) -> None:
    """Trainers hand one with every batch. Where no window ends transformers makes one, too."""
    tokens = 1024
    model = tile_model(decoder("mistral", sliding_window=window, max_position_embeddings=tokens), num_shards=8)
    assert largest_in_step(model, tokens, attention_mask=torch.ones(1, tokens, dtype=torch.long)) < tokens**2


def test_a_mask_of_ones_own() -> None:
    """More than a window, so that what is made is given on whole."""
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    seen[7:, :2] = False
    model, plain = (decoder("mistral", sliding_window=WINDOW) for _ in range(2))
    given = {"attention_mask": seen.expand(2, 1, LENGTH, LENGTH)}
    assert_equal(step(tile_model(model, num_shards=3), **given), step(plain, **given))


def test_attention_that_is_more_than_a_window() -> None:
    """A function that transformers puts beside the window: nothing of it is lost."""
    from transformers.masking_utils import create_sliding_window_causal_mask

    model = tile_model(decoder("mistral", sliding_window=WINDOW))
    x = torch.zeros(2, LENGTH, 16)

    def made(**more: Any) -> Any:
        return create_sliding_window_causal_mask(model.config, x, None, None, **more)

    def is_first(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key == 0

    positions = torch.arange(LENGTH).remainder(7).expand(2, -1)
    blocks = torch.tensor([-1] * 10 + [0] * 4).expand(2, -1)
    assert made().shape == (0, 0, 0, WINDOW)
    beside = [{"or_mask_function": is_first}, {"and_mask_function": is_first}]
    for more in (*beside, {"position_ids": positions}, {"block_sequence_ids": blocks}):
        assert made(**more).shape == (2, 1, LENGTH, LENGTH)


@pytest.mark.parametrize("window", [1, LENGTH - 1, LENGTH, LENGTH + 1])
def test_windows_at_the_edges(window: int) -> None:
    changes = {"sliding_window": window}
    model = tile_model(decoder("mistral", **changes), scope="block", num_shards=3)
    assert_equal(step(model), step(decoder("mistral", **changes)))


def test_generating_goes_on_as_before() -> None:
    """With a cache, which in its second call has more keys than queries, and in one of several tokens."""
    plain = decoder("mistral", sliding_window=WINDOW).eval()
    model = tile_model(decoder("mistral", sliding_window=WINDOW)).eval()
    for more in ({}, {"cache_implementation": "static"}, {"use_cache": False}, {"prefill_chunk_size": 5}):
        options = {"max_new_tokens": 6, "do_sample": False, **more}
        assert torch.equal(model.generate(IDS, **options), plain.generate(IDS, **options)), more


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:The .grad attribute"
)  # raised inside torch's own tracer
def test_compiled_models_have_the_mask_of_transformers() -> None:
    """As one graph, and layer by layer, where blocks of queries would be as many operations."""
    one = {"sliding_window": WINDOW, "num_hidden_layers": 1}
    expected = step(decoder("mistral", **one))
    whole, by_layer = (tile_model(decoder("mistral", **one)) for _ in range(2))
    for layer in by_layer.model.layers:
        layer.compile(backend="eager", fullgraph=True)
    compiled: Any = torch.compile(whole, backend="eager", fullgraph=True)
    assert_equal(step(by_layer), expected)
    loss = compiled(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    assert_equal((loss.detach(), {name: p.grad for name, p in whole.named_parameters()}), expected)


def test_copies_and_files(tmp_path: Path) -> None:
    """The implementation is in no file, and a pickled model attends so in another process."""
    model = tile_model(windowed("cohere2"), num_shards=3)
    loss = step(model)[0]
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config._attn_implementation == "sdpa"
    (tmp_path / "model.pickle").write_bytes(pickle.dumps((model, IDS, loss)))
    code = (
        f"import pickle; model, ids, loss = pickle.load(open({str(tmp_path / 'model.pickle')!r}, 'rb'));"
        "found = model(input_ids=ids, labels=ids, use_cache=False).loss; found.backward();"
        f"assert (found - loss).abs() <= {MODEL_FLOAT32} * loss; print(model.config._attn_implementation)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[-1] == SDPA


def test_models_without_windows_and_of_other_types_stay_as_they_are() -> None:
    assert tile_model(decoder("llama")).config._attn_implementation == "sdpa"
    assert tile_model(decoder("mistral", sliding_window=None)).config._attn_implementation == "sdpa"
    model = tile_model(tiny_model(tiny_config("gemma4_text", {}), transformers.AutoModelForCausalLM, torch.float64))
    assert model.config._attn_implementation == "sdpa"
    eager = decoder("mistral", sliding_window=WINDOW)
    eager.set_attn_implementation("eager")
    assert tile_model(eager).config._attn_implementation == "eager"


def test_a_configuration_that_others_hold_is_not_changed() -> None:
    config = decoder("mistral", sliding_window=WINDOW).config
    first, second = (transformers.MistralForCausalLM(config) for _ in range(2))
    tile_model(first)
    assert (first.config._attn_implementation, first.model.config._attn_implementation) == (SDPA, SDPA)
    assert second.config._attn_implementation == "sdpa"


def test_checkpointed_layers_with_dropout() -> None:
    """Random numbers are drawn again in backward: a step is that of layers that keep all they made."""
    changes = {"sliding_window": WINDOW, "attention_dropout": 0.3}
    kept, again = (tile_model(decoder("mistral", **changes), scope="mlp", num_shards=3) for _ in range(2))
    again.activation_checkpointing_enable({"use_reentrant": False})
    blocks = tile_model(decoder("mistral", **changes), scope="block", num_shards=3)
    assert_equal(step(again), step(kept))
    assert_equal(step(blocks), step(kept))
    assert (step(kept)[0] - step(kept.eval())[0]).abs() > MODEL_FLOAT32
