"""Context parallelism on two and four gloo ranks: losses and gradients of one process, whatever attention the model has."""

import pytest

from shared_specs.layers.block_costs import eager_block_row_bytes
from shared_specs.tolerances import COST_BYTES, DISTRIBUTED_FLOAT64, MODEL_FLOAT32, limit
from tests.ranks import Ranks

pytestmark = pytest.mark.ranks

_HERE = "tests.layers.ranks_torch_context:"
WINDOWED = {"sliding_window": 5}
PART_SIZES = {"hidden_size": 24, "head_dim": 4, "num_attention_heads": 8, "num_key_value_heads": 2}


def check(answers):
    for found in answers:
        for name, errors in found.items():
            assert errors["loss"] <= DISTRIBUTED_FLOAT64, name
            assert errors["gradients"] <= DISTRIBUTED_FLOAT64, name


def test_llama_on_two_ranks(pools):
    """Most labels of the first rank's tokens are ignored."""
    check(pools[2].run(_HERE + "models", names=["cp 2", "cp 2, full", "cp 2, products"]))


def test_rings(pools):
    """More ranks than heads in each group of them; layers as one function attend one key head at a time."""
    sizes = {"length": 16, "num_key_value_heads": 2}
    check(pools[2].run(_HERE + "models", names=["ring 2", "ring 2, full", "ring 2, op"], **sizes))
    check(pools[4].run(_HERE + "models", names=["ring 2 x cp 2"], **sizes))
    for found in pools[2].run(_HERE + "blocks", names=["ring 2"], kind="llama", num_key_value_heads=2):
        assert found["ring 2"]["layers"] == ["tiled_block"]
        assert found["ring 2"]["gradients"] <= DISTRIBUTED_FLOAT64


@pytest.mark.slow
def test_rings_beside_other_axes(pools):
    names = ["ring 4", "fsdp 2 x ring 2", "ring 2 x tp 2"]
    check(pools[4].run(_HERE + "models", names=names, length=16, num_key_value_heads=2))


def check_packed(answers):
    for found in answers:
        for name, errors in found.items():
            assert errors["loss"] <= (MODEL_FLOAT32 if name.endswith("block") else DISTRIBUTED_FLOAT64), name
            assert errors["gradients"] <= DISTRIBUTED_FLOAT64, name


def test_packed_documents(pools):
    """Positions restart, attention stays within documents, the last token of one predicts nothing."""
    check_packed(pools[2].run(_HERE + "packed", names=["cp 2, full", "ring 2, full"]))
    check_packed(pools[4].run(_HERE + "packed", names=["ring 2 x cp 2"], num_key_value_heads=2))


@pytest.mark.slow
def test_packed_documents_of_windows(pools):
    names = ["cp 2, full", "ring 2"]
    check_packed(pools[2].run(_HERE + "packed", names=names, kind="mistral", **WINDOWED))
    check_packed(pools[2].run(_HERE + "packed", names=names, kind="gemma3", scopes=[None, "mlp"], **WINDOWED))


@pytest.mark.slow
def test_rings_of_eight_ranks():
    with Ranks(8) as eight:
        check(eight.run(_HERE + "models", names=["ring 8", "ring 4 x cp 2"], length=16, num_key_value_heads=2))
        check_packed(eight.run(_HERE + "packed", names=["ring 8"]))


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (16, 2), (24, 3)])
def test_layers_as_one_function_on_eight_ranks(heads, kv_heads):
    """One key head for each rank, with four query heads that take turns; or copies of two, and of three."""
    sizes = {"hidden_size": 96, "head_dim": 4, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    with Ranks(8) as eight:
        for found in eight.run(_HERE + "blocks", names=["cp 8, offload"], kind="qwen3", length=16, **sizes):
            assert found["cp 8, offload"]["layers"] == ["tiled_block"]
            assert found["cp 8, offload"]["gradients"] <= DISTRIBUTED_FLOAT64


@pytest.mark.slow
def test_llama_beside_other_axes(pools):
    """Grouped queries: the two key heads are repeated for four ranks."""
    names = ["cp 4", "fsdp 2 x cp 2", "fsdp 2 x cp 2, full", "replicas 2 x cp 2", "cp 2 x sp 2", "cp 2 x tp 2"]
    check(pools[4].run(_HERE + "models", names=names, num_key_value_heads=2))


@pytest.mark.deep_but(2)
@pytest.mark.parametrize("heads", [4, 1])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
def test_layers_as_one_function(pools, kind, heads):
    """Two key heads for each rank attend in two turns; one for both ranks is repeated. Windows and norms of heads too."""
    options = {"names": ["cp 2", "cp 2, offload"], "kind": kind, "num_key_value_heads": heads}
    answers = pools[2].run(_HERE + "blocks", **options | (WINDOWED if kind == "mistral" else {}))
    for found in answers:
        assert found["cp 2"]["loss"] <= MODEL_FLOAT32  # transformers' own loss is float32
        for each in found.values():
            assert each["layers"] == ["tiled_block"]
            assert each["gradients"] <= DISTRIBUTED_FLOAT64


# Query heads and key heads, of which each rank of two has one with four query heads, or a copy with four or two.
PARTS = [(8, 2), (8, 1), (12, 3)]


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(("heads", "kv_heads"), PARTS)
def test_query_heads_that_attend_in_parts(pools, heads, kv_heads):
    """Of one key head: the gradients of keys and values are sums over the parts."""
    sizes = {"hidden_size": 24, "head_dim": 4, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    for found in pools[2].run(_HERE + "blocks", names=["cp 2"], kind="qwen3", **sizes):
        assert found["cp 2"]["layers"] == ["tiled_block"]
        assert found["cp 2"]["gradients"] <= DISTRIBUTED_FLOAT64


@pytest.mark.slow
def test_query_heads_of_packed_documents_that_attend_in_parts(pools):
    check_packed(pools[4].run(_HERE + "packed", names=["cp 4"], scopes=["block"], **PART_SIZES))
    check_packed(pools[4].run(_HERE + "packed", names=["ring 2 x cp 2"], scopes=["block"], **PART_SIZES))
    for found in pools[2].run(_HERE + "blocks", names=["cp 2"], kind="mistral", **PART_SIZES, **WINDOWED):
        assert found["cp 2"]["gradients"] <= DISTRIBUTED_FLOAT64


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "heads"), [("llama", 4), ("qwen3", 2)])
def test_layers_as_one_function_beside_tensor_parallelism(pools, kind, heads):
    """Two key heads are one for each rank of the tensor axis, which the ranks of the context repeat."""
    names = ["cp 2 x sp 2", "cp 2 x tp 2"]
    for found in pools[4].run(_HERE + "blocks", names=names, kind=kind, num_key_value_heads=heads):
        for each in found.values():
            assert each["layers"] == ["tiled_block"]
            assert max(each["loss"], each["gradients"]) <= DISTRIBUTED_FLOAT64


@pytest.mark.deep_but(2)
@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "smollm3"])
def test_families(pools, kind):
    """Windows, caps of scores, norms of heads, biases, tied embeddings; transformers' own masks are the truth."""
    changes = WINDOWED if kind in ("mistral", "gemma2", "gemma3", "smollm3") else {}
    if kind == "smollm3":
        changes = changes | {"no_rope_layers": [1, 0, 1], "use_sliding_window": True}
    if kind in ("gemma2", "gemma3", "smollm3"):
        changes = changes | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    check(pools[2].run(_HERE + "models", names=["cp 2, full"], kind=kind, **changes))


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts(pools, kind):
    """Routers compute in float32. Each rank's experts see its own tokens."""
    changes = WINDOWED if kind == "mixtral" else {}
    for found in pools[2].run(_HERE + "models", names=["cp 2, full", "ring 2, full"], kind=kind, **changes):
        for name, errors in found.items():
            assert max(errors["loss"], errors["gradients"]) <= MODEL_FLOAT32, name
    for found in pools[2].run(_HERE + "blocks", names=["cp 2"], kind=kind, **changes):
        assert found["cp 2"]["layers"] == ["tiled_block"]
        assert max(found["cp 2"]["loss"], found["cp 2"]["gradients"]) <= MODEL_FLOAT32


def test_losses_of_routers_are_refused(pools):
    """In the configuration and in a call: with shared sequences, and with a mean over all tokens."""
    name, rest = "output_router_logits must be False, got True. The losses of routers", "are means over all tokens"
    for found in pools[2].run(_HERE + "router_losses"):
        assert found.pop("call") == (
            "forward with context parallelism: output_router_logits must be left out, got bool. The losses of routers are "
            "means over all tokens, of which a rank has a part."
        )
        assert [*found] == ["configuration", "token mean"]
        for text in found.values():
            assert f"{name} {rest}" in text


def test_what_the_model_returns(pools):
    for found in pools[2].run(_HERE + "loss_of_the_model"):
        for name in ("loss", "logits", "divided"):
            assert found[name] <= MODEL_FLOAT32, name
        assert (found["shifted"], found["tuple"], found["nothing"], found["cache"]) == (0, 0, 0, True)


def test_functions(pools):
    for ranks in (pools[2], pools[4]):
        world, answers = ranks.world, ranks.run(_HERE + "functions")
        for rank, found in enumerate(answers):
            assert all(error <= DISTRIBUTED_FLOAT64 for error in found["attention"].values()), found["attention"]
            own, tokens = list(range(6 * rank, 6 * (rank + 1))), 6 * world
            labels = [own, [tokens + token for token in own]]
            shifted = [[-7 if (token + 1) % tokens == 0 else token + 1 for token in row] for row in labels]
            expected = {"labels": labels, "input_ids": labels, "nothing": None, "shift_labels": shifted}
            assert found["slice"] == expected | {"position_ids": [own]}


def test_no_rank_holds_a_whole_sequence(pools):
    """The largest tensor with all tokens is that of a rank's own heads, q, k and v in one."""
    for found in pools[4].run(_HERE + "memory", length=52):
        assert found["largest"] == found["heads"] < found["hidden"], found


# Of Llama-3-8B's heads to each other, in float32.
WIDE = {"hidden": 128, "heads": 16, "head_dim": 8, "itemsize": 4}


def check_bytes(answers, kv_heads, kept, ranks):
    predicted = eager_block_row_bytes(**WIDE, kv_heads=kv_heads, kept_layers=kept, exchanging=ranks)
    for slope in answers:
        print(kv_heads, kept, ranks, slope / 512, predicted / 512)
        assert slope == pytest.approx(predicted, rel=COST_BYTES)


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.deep)])
def test_bytes_a_token_of_layers_as_one_function(pools, ranks):
    """Of one rank's tokens, whose inputs wait on the host: as many as without a context."""
    alone, shared = (eager_block_row_bytes(**WIDE, kv_heads=4, exchanging=n) for n in (1, ranks))
    assert shared == alone <= 7 * WIDE["hidden"] * WIDE["itemsize"]
    check_bytes(pools[ranks].run(_HERE + "bytes_a_token", name=f"cp {ranks}, offload"), 4, 0, ranks)


@pytest.mark.slow
@pytest.mark.figures
@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 2), (2, 8), (2, 16), (4, 2), (4, 8), (4, 16)])
def test_bytes_a_token_of_few_and_many_key_heads(pools, ranks, kv_heads):
    """Of which some are repeated for the ranks, or every rank has several; also of layers that keep their inputs."""
    for name, kept in ((f"cp {ranks}, offload", 0), (f"cp {ranks}", 2)):
        answers = pools[ranks].run(_HERE + "bytes_a_token", name=name, num_key_value_heads=kv_heads)
        check_bytes(answers, kv_heads, kept, ranks)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(("kv_heads", "turns"), [(16, 8), (4, 4), (1, 4)])
def test_exchanges_of_a_layer(pools, kv_heads, turns):
    """There and back in forward, in backward again, and the gradients of both: each element once. Of 16 query heads of 8
    columns and their key heads, of which one is repeated for two ranks."""
    columns = 2 * 128 + 2 * 8 * max(kv_heads, 2)
    for found in pools[2].run(_HERE + "exchanges", name="cp 2", num_key_value_heads=kv_heads):
        assert found == [6 * turns, 3 * columns]


@pytest.mark.deep
def test_rings_write_out_nothing_of_all_tokens(pools):
    """Neither keys nor scores of a packed sequence, nor a mask of its tokens for a rank's own."""
    for largest, live, mask in pools[4].run(_HERE + "memory_of_rings", length=480):
        assert largest == 0
        assert live < mask


@pytest.mark.deep
def test_compiled_blocks(pools):
    for name in ("cp 2, full", "ring 2, full"):
        check([{name: found} for found in pools[2].run(_HERE + "compiled", name=name)])


def test_mixed_precision(pools):
    for found in pools[2].run(_HERE + "mixed_precision"):
        assert found["error"] <= limit(found["baseline"], "bfloat16")


REFUSALS = {
    "heads": ("SpecError", "parallelize: num_attention_heads must be a multiple of the 2 ranks of the mesh axes cp, got 3"),
    "pipeline": ("SpecError", "parallelize: config.data.pipeline must be False with config.data.context_axis, got True"),
    "ddp": ("SpecError", "parallelize: config.data.context_axis must be left at None with engine=\"ddp\", got 'cp'"),
    "attention": ("UnsupportedError", "parallelize: model must be one whose attention is torch's scaled_dot_product"),
    "rope": ("UnsupportedError", "parallelize: rope_type must be one that does not depend on the length of the sequence"),
    "no context": ("UnsupportedError", "parallelize: config.data.context_axis must be None for a model that does not say"),
    "classifier": ("UnsupportedError", "parallelize: config.data.context_axis must be None for a model that does not say"),
    "dropout": ("UnsupportedError", "parallelize: attention_dropout must be 0 with rings, got 0.1. Set it to 0, or"),
    "classifier in a ring": ("UnsupportedError", "parallelize: config.data.context_axis must be None for a model that does"),
    "odd tokens": ("SpecError", "ring_attention: q must be of an even number of tokens, for the two runs that a rank"),
    "no keys": ("SpecError", "ring_attention: window must be >= 1 or None, got 0"),
    "no cap": ("SpecError", "ring_attention: softcap must be > 0 or None, got 0.0"),
    "other tokens": ("SpecError", "ring_attention: q, k, v must be the same on all 2 ranks, got 'float32 [1, 2, 4, 4],"),
    "documents": ("SpecError", "ring_attention: documents must be of shape [1, 8] or [1, 8], got [1, 4]. Every rank is"),
    "order": ("SpecError", "context_slice: order must be one of tokens, zigzag, got 'zag'"),
    "runs": ("SpecError", "context_slice: batch['labels'] must be of a multiple of 4 tokens, for 2 ranks that hold two runs"),
    "batches": ("SpecError", "forward with context parallelism: the batch must be the same on every rank of the axis, got"),
    "tokens": ("SpecError", "context_slice: batch['input_ids'] must be of a multiple of 2 tokens"),
    "positions": ("SpecError", "forward with context parallelism: position_ids must be [B or 1, tokens], of whole"),
    "mask": ("SpecError", "forward with context parallelism: attention_mask must be left out, or all ones"),
    "mask of scores": ("SpecError", "forward with context parallelism: attention_mask must be left out, or all ones"),
    "mask, by place": ("SpecError", "forward with context parallelism: attention_mask must be left out, or all ones"),
    "weights": ("SpecError", "forward with context parallelism: output_attentions must be left out, got bool"),
    "keep": ("SpecError", "forward with context parallelism: logits_to_keep must be left out, got int"),
    "cache": ("SpecError", "forward with context parallelism: use_cache must be left out, got bool"),
    "unknown": ("UnsupportedError", "forward with context parallelism: cu_seq_lens_q must be left out"),
    "loss": ("UnsupportedError", "forward with context parallelism: loss_function must be ForCausalLMLoss, got <lambda>"),
    "odd heads": ("SpecError", "context_attention: the number of query heads must be a multiple of the 2 ranks"),
    "shapes": ("SpecError", "context_attention: q, k, v must be of the same sequences and tokens, q and k of the same d"),
    "key heads": ("SpecError", "context_attention: k, v must be heads whose number divides the query heads"),
    "three dims": ("SpecError", "context_attention: q must be of shape [B, heads, tokens, d], got [3, 4, 5]"),
    "result": ("SpecError", "context_attention: the result of attend must be of shape [1, 2, 4, ...], got [1, 2, 1, 3]"),
    "uneven": ("SpecError", "context_slice: batch['input_ids'] must be of [sequences, 12, ...], got [4, 11]"),
    "no tensor": ("TypeError", "context_slice: batch['labels'] must be a tensor or None, got list"),
}  # fmt: skip


def test_refused_before_anything_is_sent(pools):
    for found in pools[2].run(_HERE + "refusals"):
        assert found.pop("collectives") == [{}, True]
        assert found.keys() == REFUSALS.keys()
        for name, (kind, words) in REFUSALS.items():
            error, text, *untouched = found[name]
            assert error == kind, (name, text)
            assert text.startswith(words), (name, text)
            assert untouched in ([], [True]), name
