"""`parallelize` on two and four gloo ranks: the losses and gradients of one process, whatever the configuration."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from shared_specs import UnsupportedError
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.models.torch_decoders import BATCH
from tests.plans.ranks_torch_tiled import HIDDEN, SHARDS
from tests.ranks import Ranks
from tiled_torch.plans import tensor_styles

pytestmark = pytest.mark.ranks

_HERE = "tests.plans.ranks_torch_plans:"
_DATA = "tests.plans.ranks_torch_data:"
_TILED = "tests.plans.ranks_torch_tiled:"
ONE_AXIS = ["tp", "sp", "sp, gathered logits", "sp, full", "sp, offload", "sp, products", "sp, op", "fsdp"]
ONE_AXIS += [
    "fsdp, inputs offloaded",
    "fsdp, layers",
    "fsdp, always",
    "fsdp, pipeline",
    "fsdp, offload",
    "fsdp, products",
    "ddp",
]
OLD = torch.__version__ < (2, 12)
UNITS = 5  # of a sharded model: its embedding, three layers, and its norm with its head
TWO_AXES = ["hsdp", "fsdp x sp", "fsdp x sp, gathered logits", "fsdp x tp"]


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four():
    with Ranks(4) as ranks:
        yield ranks


def check(answers):
    """Every loss and every gradient, on every rank, is that of one process; none is left a partial sum."""
    for found in answers:
        for name, errors in found.items():
            assert errors["loss"] <= DISTRIBUTED_FLOAT64, name
            assert errors["gradients"] <= DISTRIBUTED_FLOAT64, name
            assert not errors.get("partial"), name


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("tiled", [False, True])
def test_llama_on_one_axis(two, tiled):
    names = [name for name in ONE_AXIS if not (tiled and "gathered" in name)]
    answers = two.run(_HERE + "models", names=names, tiled=tiled)
    check(answers)
    paths = answers[0]["sp"]["paths"]
    assert paths == (["tensor_parallel_mlp", "vocab_parallel_linear_cross_entropy"] if tiled else [])


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("tiled", [False, True])
def test_op_repeats_no_reduce_scatter(two, tiled):
    """Neither DTensor's nor those of our own layers."""
    for found in two.run(_HERE + "reduce_scatters", tiled=tiled):
        for kind, layers in (("decoder", 3), ("own", 2)):
            counts = {mode: found[mode][kind] for mode in found}
            assert counts["op"] == counts["nothing"] <= counts["full"] - layers, (kind, counts)
        assert found["op"]["gradients"] == found["nothing"]["gradients"]


@pytest.mark.parametrize("ids", [(2, 9), (9,)], ids=str)
def test_uneven_tokens_are_refused_where_pytorch_cannot(monkeypatch, ids):
    """As with PyTorch 2.11; where tokens are whole on every rank, or share evenly, nothing is."""
    monkeypatch.setattr(tensor_styles, "_EVEN_TOKENS", True)
    for layout, ranks in ((Replicate(), 4), (Shard(len(ids) - 1), 3)):
        tensor_styles.check_tokens(ids, layout, ranks)
    message = (
        r"^parallelize: the tokens of a sequence must be a multiple of the 4 ranks with PyTorch .*, got 9\. Pad them"
    )
    with pytest.raises(UnsupportedError, match=message):
        tensor_styles.check_tokens(ids, Shard(len(ids) - 1), 4)


@pytest.mark.deep
@pytest.mark.skipif(OLD, reason="refused with PyTorch 2.11, whose linear layers cannot: see the test above")
@pytest.mark.parametrize("tiled", [pytest.param(False, marks=pytest.mark.slow), True])
def test_llama_on_two_axes_and_uneven_tokens(four, tiled):
    """Ten tokens over four ranks are 3, 3, 3 and 1."""
    names = [name for name in ["tp", "sp", *TWO_AXES] if not (tiled and "gathered" in name)]
    check(four.run(_HERE + "models", names=names, tiled=tiled))


@pytest.mark.deep
@pytest.mark.parametrize("tiled", [False, True])
def test_llama_on_two_ranks_of_four(four, tiled):
    """Neither the first rank nor the default group has a part in it."""
    answers = four.run(_HERE + "on_a_subset", names=["tp", "sp", "sp, full", "fsdp", "ddp"], tiled=tiled)
    assert [found is None for found in answers] == [True, False, True, False]
    check(found for found in answers if found is not None)


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "smollm3"])
def test_families(two, kind):
    """Norms of heads, biases, tied embeddings, caps of logits, windows of attention, layers without rotary positions."""
    changes = {"no_rope_layers": [1, 0, 1]} if kind == "smollm3" else {}
    check(two.run(_HERE + "models", names=["tp", "sp", "fsdp"], kind=kind, **changes))
    check(two.run(_HERE + "models", names=["sp", "tp"], kind=kind, tiled=True, **changes))


@pytest.mark.parametrize("tiled", [False, True])
def test_fused_projections(two, tiled):
    """Phi-3: sharded and recomputed; not split."""
    check(two.run(_HERE + "models", names=["fsdp", "fsdp, products", "ddp"], kind="phi3", tiled=tiled))


@pytest.mark.deep
def test_head_norms_are_split_over_two_axes(four):
    check(four.run(_HERE + "models", names=["fsdp x sp", "fsdp x tp"], kind="gemma3"))


@pytest.mark.deep
def test_grouped_queries_and_biases(two):
    changes = {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}
    for tiled in (False, True):
        check(two.run(_HERE + "models", names=["tp", "sp"], tiled=tiled, **changes))


@pytest.mark.deep
def test_linear_attention_with_a_plan_of_its_own(two, four):
    names, length = ["tp", "sp", "sp, full", "sp, products", "fsdp", "ddp"], 9 if OLD else 10
    check(two.run(_HERE + "linear_attention", names=names, length=length))
    check(four.run(_HERE + "linear_attention", names=["hsdp", "fsdp x sp", "fsdp x tp"], length=9))


def test_own_modules(two):
    for found in two.run(_HERE + "own_modules"):
        assert max(found.values()) <= DISTRIBUTED_FLOAT64, found


def test_meta_device(two, four):
    for answers in (two.run(_HERE + "meta", names=["sp", "fsdp"]), four.run(_HERE + "meta", names=["fsdp x sp"])):
        for found in answers:
            for name, result in found.items():
                assert result["loss"] <= DISTRIBUTED_FLOAT64, name
                assert result["drawn"], name  # the same values on any mesh, to the last bit
                assert result["other"] > 0


def check_split_ends(found):
    """Embedding, norm and head of a split model are each a graph: nothing breaks them, and nothing else is in them."""
    (embedding,) = (set(functions) for functions in found["functions"] if "embedding" in functions)
    assert embedding <= {"embedding", "from_local", "ge", "lt", "mul", "or_", "sub"}
    assert ["add", "mul", "rsqrt"] in found["functions"]
    assert ["linear"] in found["functions"]


@pytest.mark.deep
@pytest.mark.skipif(
    OLD, reason="torch.compile of PyTorch 2.11 takes no linear layer of DTensors with lengths that change"
)
@pytest.mark.parametrize(
    "names",
    [
        ["fsdp, always", "fsdp, products", "ddp", "sp, full"],
        pytest.param(["fsdp", "sp"], marks=[pytest.mark.slow, pytest.mark.figures]),
    ],
    ids=["recomputed", "kept"],
)
def test_compiled_blocks(two, names):
    """Through dynamo and AOT autograd; one graph serves the equal layers where nothing breaks it."""
    answers = two.run(_HERE + "compiled", names=names, backend="aot_eager")
    check(answers)
    for found in answers:
        assert found[names[0]]["graphs"] == 4  # a layer, embedding, norm and head
        assert all(errors["graphs"] > 0 for errors in found.values())
        check_split_ends(found[names[-1]])


@pytest.mark.slow
def test_compiled_ends_that_are_split():
    """Without sequence parallelism, with gathered logits, tied, beside data parallelism; by ranks of their own, as below."""
    with Ranks(2) as fresh:
        check(answers := fresh.run(_HERE + "compiled", names=["tp", "sp, gathered logits"], backend="aot_eager"))
        for found in answers:
            check_split_ends(found["tp"])
            check_split_ends(found["sp, gathered logits"])
    with Ranks(2) as fresh:
        check(fresh.run(_HERE + "compiled", names=["sp", "tp"], backend="aot_eager", kind="gemma"))
    with Ranks(2) as fresh:
        check(fresh.run(_HERE + "compiled", names=["sp"], backend="inductor"))
    with Ranks(4) as fresh:
        check(fresh.run(_HERE + "compiled", names=["fsdp x sp"], backend="aot_eager"))


@pytest.mark.slow
def test_compiled_tiled_blocks(two):
    """A layer, embedding and norm; recomputed layers too."""
    names = ["fsdp", "fsdp, always", "fsdp, products"]
    answers = two.run(_HERE + "compiled", names=names, backend="aot_eager", tiled=True)
    check(answers)
    for found in answers:
        assert [found[name]["graphs"] for name in names] == [3, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sp", "sp, full"])
def test_compiled_tiled_blocks_that_are_split(name):
    """By ranks of their own: frames that were compiled remember the process groups of calls before."""
    with Ranks(2) as fresh:
        answers = fresh.run(_HERE + "compiled", names=[name], backend="aot_eager", tiled=True)
    check(answers)
    assert all(errors["graphs"] > 0 for found in answers for errors in found.values())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tiled", [False, True])
def test_inductor_on_two_axes(tiled):
    """Data 2 x tensor 2; four ranks compile for minutes on two cores."""
    with Ranks(4, hang_seconds=500) as fresh:
        check(fresh.run(_HERE + "compiled", names=["fsdp x sp"], backend="inductor", tiled=tiled))


def test_models_on_one_mesh_share_its_axes(two):
    """As one object: of two that are equal the compiler would derive one from the other, which inductor cannot."""
    for found in two.run(_HERE + "axes_of_two_models"):
        assert found == {"one object": True, "of the axis": True}


@pytest.mark.deep
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_autograd(two, backend):
    """DDP's reductions as operations of a backward that is compiled whole."""
    for found in two.run(_DATA + "compiled_autograd", backend=backend):
        assert found["gradients"] <= DISTRIBUTED_FLOAT64


def test_reshard_policies(two):
    """Of embedding, three layers and head: whether they hold their own part only after forward."""
    for found in two.run(_DATA + "reshard"):
        assert found == {
            "default": [True, True, True, False, False],
            "always": [True] * 5,
            "never": [False] * 5,
            "pipeline": [False] * 5,
        }


def test_cpu_offload_is_asked_of_every_unit(two):
    for found in two.run(_DATA + "offloaded"):
        assert found == {"offload": ["CPUOffloadPolicy"] * UNITS, "default": ["OffloadPolicy"] * UNITS}


def test_mixed_precision(two):
    for found in two.run(_DATA + "mixed_precision"):
        assert found["seen"] == ["torch.bfloat16 torch.bfloat16"]
        assert found["kept"] == ["torch.float32 torch.float32"]
        assert found["reduced"] == ["torch.float32"] * UNITS
        assert found["error"] <= limit(found["baseline"], "bfloat16")


def test_a_sequence_parallel_loss_gathers_one_shard_at_a_time(two):
    """Never [B, S, H], which only results for every token need."""
    length = 10
    whole, shard = BATCH * length * HIDDEN, BATCH * length // SHARDS * HIDDEN
    for found in two.run(_TILED + "loss_gathers", length=length):
        at_once = [elements for elements, _ in found.values()]
        assert at_once[:2] == [shard, whole]
        assert 0 < at_once[2] <= shard  # of a model, whose last tokens have no label, the others in shards no longer
        assert max(error for _, error in found.values()) <= DISTRIBUTED_FLOAT64


@pytest.mark.parametrize("tiled", [False, True, pytest.param("block", marks=pytest.mark.slow)])
def test_bfloat16(two, tiled):
    """Split in bfloat16; sharded float32 weights computed with in bfloat16, their gradients summed in float32."""
    names = ["tp", "sp", "fsdp"]
    for found in two.run(_TILED + "bfloat16", names=names, tiled=tiled):
        for name in names:
            for error, baseline in zip(found[name]["errors"], found[name]["baseline"], strict=True):
                assert error <= limit(baseline, "bfloat16"), name
        assert [found[name]["gradients"] for name in names] == [["torch.bfloat16"]] * 2 + [["torch.float32"]]


@pytest.mark.deep
@pytest.mark.parametrize("tiled", [True, pytest.param("block", marks=pytest.mark.slow)])
def test_bfloat16_on_two_axes(four, tiled):
    for found in four.run(_TILED + "bfloat16", names=["fsdp x sp"], tiled=tiled):
        for error, baseline in zip(found["fsdp x sp"]["errors"], found["fsdp x sp"]["baseline"], strict=True):
            assert error <= limit(baseline, "bfloat16")
        assert found["fsdp x sp"]["gradients"] == ["torch.float32"]


def test_other_heads(two):
    for found in two.run(_TILED + "other_heads", names=["tp", "sp", "fsdp"]):
        assert max(found.values()) <= DISTRIBUTED_FLOAT64, found


def test_embeddings(four):
    """A rank's gradient is of the rows that it holds, for which it needs the gradients of all tokens and nothing else."""
    vocab, tokens = 5, 8 if OLD else 7
    for rank, found in enumerate(four.run(_TILED + "embeddings", vocab=vocab, tokens=tokens)):
        assert found.pop("outside") == f"Embedding: ids must be in [0, {vocab}), got {vocab}."
        whole, split = found.values()
        for one in (whole, split):
            assert one["rows"] == [[2, 2, 1, 0][rank], HIDDEN]
            assert max(one["y"], one["dw"]) <= DISTRIBUTED_FLOAT64
        assert whole["collectives"] == {}
        sent = {name: count for name, count in split["collectives"].items() if not name.startswith(("wait", "_wrap"))}
        assert sent == {"all_gather_into_tensor": 1}


@pytest.mark.parametrize("tokens", [1504, 1501 if not OLD else 1500])
def test_an_embedding_of_long_sequences(four, tokens):
    """A shard of the tokens at a time, also where the last rank has fewer: in backward never those of all ranks."""
    chunk = -(-tokens // 4)
    for rank, found in enumerate(four.run(_TILED + "long_embeddings", tokens=tokens)):
        exact, half = found["torch.float64"], found["torch.bfloat16"]
        assert max(exact["y"], exact["dw"], half["y"]) <= DISTRIBUTED_FLOAT64
        assert half["dw"] <= half["dw of all at once"]
        for one in (exact, half):
            assert one["own"] == [2, min(chunk, tokens - rank * chunk), HIDDEN]
            counts, largest = one["gathered"]
            assert counts == {"_allgather_base_": 4}  # of 3008 rows, at most 1024 at once, as many of both sequences
            assert 4 * 3008 * HIDDEN // 16 <= largest <= 1024 * HIDDEN


def test_weights_are_tied_as_they_were(two):
    for found in two.run(_TILED + "ties"):
        assert found == {"tied by hand": True, "untied by hand": False}


@pytest.mark.parametrize("reducer", ["ddp_optimizer", "python_reducer"])
def test_ddp_reduces_in_the_dtype_asked_for(four, reducer):
    """The mean of four bfloat16 gradients is rounded once in float32, at every addition without it."""
    for found in four.run(_DATA + "ddp_reduce_dtype", reducer=reducer):
        assert found["float32"] < found["None"]
        assert found["float32"] <= limit(0.0, "bfloat16") * 2


REFUSALS = {
    "order of axes": (
        "SpecError",
        "mesh must be with its axes in the order dp_replicate, dp_shard, got dp_shard, dp_replicate",
    ),
    "missing axis": ("SpecError", "config.tensor.axis must be an axis of the mesh, one of dp_shard, got 'tp'"),
    "unused axis": ("SpecError", "mesh must be of axes that config names (tp), got dp_shard, tp"),
    "async without compile": ("SpecError", "config.tensor.asynchronous must be False"),
    "async without cuda": ("UnsupportedError", "config.tensor.asynchronous must be False here, got True"),
    "ddp on two axes": ("SpecError", 'mesh must be of one axis with engine="ddp", got dp_shard, tp'),
    "heads": ("SpecError", "num_attention_heads must be a multiple of the 2 ranks of the mesh axis 'tp', got 1"),
    "kv heads": ("SpecError", "num_key_value_heads must be a multiple of the 2 ranks of the mesh axis 'tp', got 1"),
    "intermediate": ("SpecError", "intermediate_size must be a multiple of the 2 ranks of the mesh axis 'tp', got 25"),
    "products compiled": (
        "UnsupportedError",
        'config.checkpointing.mode must be "full" or "layers" with config.tensor',
    ),
    "op compiled": (
        "UnsupportedError",
        'config.checkpointing.mode must be "full" or "layers" with config.tensor and config.compile, got \'op\'',
    ),
    "float8": ("UnsupportedError", "config.float8 must be False here, got True"),
    "compiled reductions": (
        "UnsupportedError",
        "config.data.reduce_dtype must be None, or the dtype of all parameters, with config.compile.compiled_autograd",
    ),
    "tiled loss gathered": ("SpecError", "config.tensor.loss_parallel must be True where the loss is tiled"),
    "fused": (
        "UnsupportedError",
        "config.tensor must be None where projections are fused, got TensorParallel for Phi3ForCausalLM",
    ),
    "embedding": ("UnsupportedError", "max_norm must be None where the vocabulary is split, got 1.0"),
    "adapter": ("UnsupportedError", "layers.1.mlp.up_proj must be nn.Linear, got Adapted"),
    "activation": (
        "UnsupportedError",
        "layers.1.mlp must be of tiled_mlp's formula where it is tiled, got act_fn is Softplus. Or untile_model(model) first.",
    ),
    "no layers": ("UnsupportedError", "config.checkpointing must be None for a model whose layers are not known"),
    "meta ddp": ("SpecError", 'model must be on a device with engine="ddp", got one on the meta device'),
    "donate": ("SpecError", "config.donate must be left at True in tiled_torch, got False"),
    "offloaded products": (
        "UnsupportedError",
        "config.checkpointing.offload must be False here, got True. Of mode 'products'",
    ),
    "block, products": ("UnsupportedError", "config.checkpointing.mode must be full with scope='block', got products."),
    "again": ("SpecError", "model must be one that has not been parallelized"),
    "nameless mesh": ("SpecError", "mesh must be a DeviceMesh with names for its axes"),
}


def test_ranks_of_a_tensor_axis_that_are_given_other_batches_are_named(four):
    text = (
        "forward with tensor parallelism over 'tp': the batch must be the same on every rank of the axis, got another one on "
        "ranks 2, 3. Deal batches out to the ranks of the data axes alone."
    )
    for found in four.run(_HERE + "batches"):
        assert found["tiled False"] == found["tiled True"] == text
        first, *later = found["hooks"]
        assert later == [first - 1] * 2


def test_refused_before_the_model_is_touched(two):
    for found in two.run(_HERE + "refusals"):
        assert found.keys() == REFUSALS.keys()
        for name, (kind, words) in REFUSALS.items():
            error, text, untouched = found[name]
            assert (error, untouched) == (kind, True), (name, text)
            assert text.startswith(f"parallelize: {words}"), (name, text)


TOKEN_MEAN = "tests.plans.ranks_torch_token_mean:token_mean"


@pytest.mark.deep
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}, {"as_trainer": True}], ids=str)
def test_the_mean_over_the_labels_of_all_ranks(two, four, options):
    """Of labels that count in unequal numbers, on some ranks in none, in one call or in micro-batches: as in one process."""
    answers = two.run(TOKEN_MEAN, names=["ddp", "fsdp"], **options)
    answers += four.run(TOKEN_MEAN, names=["hsdp", "fsdp x tp", "fsdp x cp"], **options)
    check(answers)
