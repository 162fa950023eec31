"""What the ranks run for context parallelism: whole models against one process, and its two functions. See tests/ranks.py."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from shared_specs import SpecError, UnsupportedError
from shared_specs.config import Checkpointing, Compile, DataParallel, ParallelConfig, TensorParallel, Tiling
from tests.core.torch_counting import LiveBytes
from tests.mlp.ranks_torch_engines import Collectives
from tests.models.torch_decoders import BATCH, VOCAB, decoder, loss_of, small_config
from tests.plans.ranks_torch_plans import error_between, full, snapshot
from tiled_torch.layers.attention import causal_attention
from tiled_torch.models import tile_model, tiling_paths
from tiled_torch.models.block.host_memory import host_memory
from tiled_torch.parallel import context_attention, context_slice, parallelize, ring_attention

FULL, EXACT = Checkpointing(), {"reduce_dtype": None}
RING, TWO_D = (
    DataParallel(context_axis="cp", context="ring", **EXACT),
    DataParallel(context_axis=("ring", "cp"), context="2d", **EXACT),
)
CONTEXT = DataParallel(context_axis="cp", **EXACT)
HYBRID = DataParallel(replicate_axis="replica", context_axis="cp", **EXACT)
# name -> (ranks by axis, configuration)
CONFIGS: dict[str, tuple[dict[str, int], ParallelConfig]] = {
    "cp 2": ({"dp_shard": 1, "cp": 2}, ParallelConfig(data=CONTEXT)),
    "cp 2, full": ({"dp_shard": 1, "cp": 2}, ParallelConfig(data=CONTEXT, checkpointing=FULL)),
    "cp 2, offload": ({"dp_shard": 1, "cp": 2}, ParallelConfig(data=CONTEXT, checkpointing=Checkpointing(offload=True))),
    "cp 1, offload": ({"dp_shard": 1, "cp": 1}, ParallelConfig(data=CONTEXT, checkpointing=Checkpointing(offload=True))),
    "cp 2, products": ({"dp_shard": 1, "cp": 2}, ParallelConfig(data=CONTEXT, checkpointing=Checkpointing(mode="products"))),
    "cp 4": ({"dp_shard": 1, "cp": 4}, ParallelConfig(data=CONTEXT, checkpointing=FULL)),
    "cp 4, offload": ({"dp_shard": 1, "cp": 4}, ParallelConfig(data=CONTEXT, checkpointing=Checkpointing(offload=True))),
    "cp 8, offload": ({"dp_shard": 1, "cp": 8}, ParallelConfig(data=CONTEXT, checkpointing=Checkpointing(offload=True))),
    "fsdp 2 x cp 2": ({"dp_shard": 2, "cp": 2}, ParallelConfig(data=CONTEXT)),
    "fsdp 2 x cp 2, full": ({"dp_shard": 2, "cp": 2}, ParallelConfig(data=CONTEXT, checkpointing=FULL)),
    "replicas 2 x cp 2": ({"replica": 2, "dp_shard": 1, "cp": 2}, ParallelConfig(data=HYBRID)),
    "ring 2": ({"dp_shard": 1, "cp": 2}, ParallelConfig(data=RING)),
    "ring 2, full": ({"dp_shard": 1, "cp": 2}, ParallelConfig(data=RING, checkpointing=FULL)),
    "ring 2, op": ({"dp_shard": 1, "cp": 2}, ParallelConfig(data=RING, checkpointing=Checkpointing(mode="op"))),
    "ring 4": ({"dp_shard": 1, "cp": 4}, ParallelConfig(data=RING, checkpointing=FULL)),
    "ring 8": ({"dp_shard": 1, "cp": 8}, ParallelConfig(data=RING, checkpointing=FULL)),
    "ring 4 x cp 2": ({"dp_shard": 1, "ring": 4, "cp": 2}, ParallelConfig(data=TWO_D, checkpointing=FULL)),
    "ring 2 x cp 2": ({"dp_shard": 1, "ring": 2, "cp": 2}, ParallelConfig(data=TWO_D, checkpointing=FULL)),
    "ring 2 x cp 2, offload": (
        {"dp_shard": 1, "ring": 2, "cp": 2},
        ParallelConfig(data=TWO_D, checkpointing=Checkpointing(offload=True)),
    ),
    "fsdp 2 x ring 2": ({"dp_shard": 2, "cp": 2}, ParallelConfig(data=RING, checkpointing=FULL)),
    "ring 2 x tp 2": ({"dp_shard": 1, "cp": 2, "tp": 2}, ParallelConfig(data=RING, tensor=TensorParallel())),
    "cp 2 x sp 2": (
        {"dp_shard": 1, "cp": 2, "tp": 2},
        ParallelConfig(data=CONTEXT, tensor=TensorParallel(), checkpointing=FULL),
    ),
    "cp 2 x tp 2": (
        {"dp_shard": 1, "cp": 2, "tp": 2},
        ParallelConfig(data=CONTEXT, tensor=TensorParallel(sequence_parallel=False)),
    ),
}  # fmt: skip
_MESHES: dict[Any, dict[tuple[tuple[str, int], ...], DeviceMesh]] = {}


def mesh_of(axes: dict[str, int]) -> DeviceMesh:
    """The mesh of these axes; a call makes all meshes of its world at once, in one order (see `ranks_plans.mesh_of`)."""
    group, world = dist.group.WORLD, dist.get_world_size()
    if group not in _MESHES:
        _MESHES.clear()
        wanted = {tuple(axes.items()) for axes, _ in CONFIGS.values()}
        fitting = sorted(each for each in wanted if torch.tensor([size for _, size in each]).prod() == world)
        _MESHES[group] = {
            each: init_device_mesh("cpu", tuple(n for _, n in each), mesh_dim_names=tuple(a for a, _ in each))
            for each in fitting
        }
        for each, mesh in _MESHES[group].items():
            sharding = [name for name, _ in each if name in ("dp_shard", "ring", "cp")]
            mesh[tuple(sharding)]._flatten("_".join(sharding))
    return _MESHES[group][tuple(axes.items())]


def batch(length: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels; most of the first half's labels are ignored, in each sequence as many."""
    ids = torch.randint(0, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[:, : length // 2 - 1] = -100
    return ids, labels


def rows_of(mesh: DeviceMesh) -> slice:
    """This rank's sequences: replicas and shards have their own, the other axes the same."""
    part, parts = 0, 1
    for name in mesh.mesh_dim_names or ():
        if name in ("replica", "dp_shard"):
            parts, part = parts * mesh[name].size(), part * mesh[name].size() + mesh[name].get_local_rank()
    return slice(part * BATCH // parts, (part + 1) * BATCH // parts)


def packed_positions(length: int) -> Tensor:
    """Of two to four documents in every sequence of the batch, in each others; one has a single token."""
    cuts = ([5], [1, 7], [4, 6, 11], [9, 10])
    starts = torch.zeros(BATCH, length, dtype=torch.int64)
    for row, places in zip(starts, cuts, strict=True):
        for place in places:
            row[place:] = place
    return torch.arange(length) - starts


def truth(
    kind: str, length: int, prepare: Any = None, positions: Tensor | None = None, **changes: Any
) -> tuple[float, dict[str, Tensor]]:
    """Of one process, in float64, through transformers' own attention and masks; at seams labels are masked by hand."""
    model = decoder(kind, **changes)
    if prepare is not None:
        prepare(model)
    ids, labels = batch(length)
    if positions is not None:
        labels = labels.masked_fill(positions == 0, -100)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def loss_of_logits(model: Any, given: dict[str, Any], labels: Tensor, mesh: DeviceMesh, data: DataParallel) -> Tensor:
    """The loss in float64, as a user computes it; transformers' own is float32."""
    logits = model(**given).logits
    axes = [mesh[axis] for axis in data.context_axes]
    whole = given | {"labels": labels, "shift_labels": None}
    order = "tokens" if data.context == "ulysses" else "zigzag"
    mine = context_slice(whole, order=order, group=axes[0] if len(axes) == 1 else tuple(axes))["shift_labels"]  # type: ignore[arg-type]
    total = F.cross_entropy(logits.flatten(0, 1), mine.flatten(), reduction="sum")
    valid = (mine != -100).sum()
    for axis in axes:
        dist.all_reduce(valid, group=axis.get_group())
    return total * torch.tensor([axis.size() for axis in axes]).prod() / valid


def errors(
    name: str,
    tiled: bool,
    expected: Any,
    kind: str,
    length: int,
    changes: dict[str, Any],
    scope: Any = "mlp",
    positions: Tensor | None = None,
) -> dict[str, Any]:
    """Of the loss and of all gradients."""
    axes, config = CONFIGS[name]
    mesh, model = mesh_of(axes), decoder(kind, **changes)
    if tiled:
        tile_model(model, num_shards=3, scope=scope)
    parallelize(model, mesh, config)
    ids, labels = (part[rows_of(mesh)] for part in batch(length))
    given = {"input_ids": ids} | ({} if positions is None else {"position_ids": positions[rows_of(mesh)]})
    loss = model(**given, labels=labels).loss if tiled else loss_of_logits(model, given, labels, mesh, config.data)  # type: ignore[arg-type]
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    found = {name: full(p.grad) for name, p in model.named_parameters()}
    paths = tiling_paths(model) if tiled else {}
    return {
        "loss": abs(mean.item() / dist.get_world_size() - expected[0]) / expected[0],
        "gradients": error_between(found, expected[1]),
        "layers": sorted({path for layer, path in paths.items() if layer.rsplit(".", 1)[-1].isdigit()}),
    }


def blocks(rank: int, world: int, names: list[str], kind: str, length: int = 12, **changes: Any) -> dict[str, Any]:
    """`errors` of a model whose layers are one function each."""
    expected = truth(kind, length, **changes)
    return {name: errors(name, True, expected, kind, length, changes, "block") for name in names}


def packed(
    rank: int, world: int, names: list[str], kind: str = "llama", scopes: Any = (None, "mlp", "block"), **changes: Any
) -> dict[str, Any]:
    """`errors` with documents in every sequence, untiled and tiled in both scopes."""
    positions, found = packed_positions(16), {}
    expected = truth(kind, 16, positions=positions, **changes)
    for name in names:
        for scope in scopes:
            found[f"{name}, {scope}"] = errors(name, scope is not None, expected, kind, 16, changes, scope, positions)
    return found


def models(
    rank: int, world: int, names: list[str], kind: str = "llama", length: int = 12, **changes: Any
) -> dict[str, Any]:
    """`errors` of several configurations, untiled and tiled; tensor parallelism with its own loss only."""
    expected = truth(kind, length, _uncapped if kind == "gemma2" else None, **changes)
    found = {}
    for name in names:
        for tiled in (False, True):
            if tiled or CONFIGS[name][1].tensor is None:
                found[f"{name}{', tiled' * tiled}"] = errors(name, tiled, expected, kind, length, changes)
    return found


def _uncapped(model: Any) -> None:
    """Attention with a cap, written out, because transformers' softmax of it is float32."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = options["softcap"] * torch.tanh(q @ k.mT * options["scaling"] / options["softcap"])
        return (torch.softmax(scores + mask, -1) @ v).transpose(1, 2), None

    AttentionInterface.register("capped", attention)
    AttentionMaskInterface.register("capped", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model.set_attn_implementation("capped")


def router_losses(rank: int, world: int) -> dict[str, str]:
    """What is said where a model with experts is to add its routers' losses, in three ways."""
    axes, config = CONFIGS["cp 2"]
    mesh, ids = mesh_of(axes), batch(16)[0]

    def refused(call: Callable[[], Any]) -> str:
        try:
            call()
        except (SpecError, UnsupportedError) as error:
            return str(error)
        return ""

    called = parallelize(decoder("mixtral"), mesh, config)
    mean = replace(config, data=DataParallel(loss_mean="tokens", **EXACT))
    averaged = parallelize(decoder("mixtral"), init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)), mean)
    return {
        "call": refused(lambda: called(input_ids=ids, labels=ids, output_router_logits=True)),
        "configuration": refused(lambda: parallelize(decoder("mixtral", output_router_logits=True), mesh, config)),
        "token mean": refused(lambda: averaged(input_ids=ids, labels=ids, output_router_logits=True)),
    }


def loss_of_the_model(rank: int, world: int) -> dict[str, Any]:
    """What one call of the model returns: untiled in transformers' float32, with and without names, and without labels."""
    from shared_specs.config import DataParallel as Data

    model: Any = decoder()
    ids, labels = batch(12)
    labels[1:, 6:] = -100  # so that one rank has no label of these sequences at all
    expected = model(input_ids=ids, labels=labels)
    count = torch.tensor(7)
    divided = model(input_ids=ids, labels=labels, num_items_in_batch=count).loss
    parallelize(model, mesh_of({"dp_shard": 1, "cp": world}), ParallelConfig(data=Data(context_axis="cp")))
    found = model(ids, labels=labels, attention_mask=torch.ones_like(ids))
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    nothing = model(input_ids=ids, labels=torch.full_like(labels, -100)).loss
    own = slice(rank * 12 // world, (rank + 1) * 12 // world)
    return {
        "loss": abs((found.loss - expected.loss) / expected.loss).item(),
        "logits": ((found.logits - expected.logits[:, own]).norm() / expected.logits.norm()).item(),
        "divided": abs((model(ids, labels=labels, num_items_in_batch=count).loss - divided) / divided).item(),
        "shifted": (model(ids, shift_labels=shifted, labels=labels).loss - found.loss).item(),
        "tuple": (model(ids, labels=labels, return_dict=False)[0] - found.loss).item(),
        "cache": model(ids).past_key_values is None,
        "nothing": nothing.item(),
    }


def compiled(rank: int, world: int, name: str) -> dict[str, Any]:
    """Blocks compiled through AOT autograd; exchanges and rings are breaks in their graphs."""
    import warnings
    from dataclasses import replace

    whole = torch.compile
    torch.compile = partial(whole, backend="aot_eager")  # type: ignore[assignment]
    warnings.simplefilter("ignore")  # the compiler's own
    try:
        torch.compiler.reset()
        axes, config = CONFIGS[name]
        CONFIGS["compiled"] = axes, replace(config, compile=Compile())
        return errors("compiled", True, truth("llama", 12), "llama", 12, {})
    finally:
        torch.compile = whole
        warnings.simplefilter("error")


def mixed_precision(rank: int, world: int) -> dict[str, float]:
    """bfloat16 computation of float32 weights, with gradients reduced in float32; and one process in bfloat16."""
    _, expected = truth("llama", 12)
    baseline = decoder().bfloat16()
    loss_of(baseline, *batch(12), inside=False).backward()
    config = ParallelConfig(data=DataParallel(context_axis="cp", param_dtype="bfloat16"))
    mesh = mesh_of({"dp_shard": 1, "cp": world})
    model = parallelize(decoder().float(), mesh, config)
    ids, labels = batch(12)
    loss_of_logits(model, {"input_ids": ids}, labels, mesh, config.data).backward()  # type: ignore[arg-type]
    found = {name: full(p.grad).double() for name, p in model.named_parameters()}
    plain = {name: p.grad.double() for name, p in baseline.named_parameters()}
    return {"error": error_between(found, expected), "baseline": error_between(plain, expected)}


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """The most elements of a tensor that has all tokens of a sequence in one of its dims."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.largest, self.shape = tokens, 0, ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_iter(out):
            if isinstance(x, Tensor) and self.tokens in x.shape and x.is_floating_point() and x.numel() > self.largest:
                self.largest, self.shape = x.numel(), tuple(x.shape)
        return out


def memory(rank: int, world: int, length: int) -> dict[str, Any]:
    """Of one forward and backward the largest float tensor with all tokens; `heads`: what a rank's heads need of them."""
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    model = tile_model(decoder(**sizes), num_shards=3)
    parallelize(model, mesh_of({"dp_shard": 1, "cp": world}), ParallelConfig(data=CONTEXT, checkpointing=FULL))
    ids = batch(length)[0][:1]
    with LargestTensor(length) as meter:
        model(input_ids=ids, labels=ids).loss.backward()
    config: Any = model.config
    query = config.num_attention_heads // world
    key = max(config.num_key_value_heads // world, 1)
    return {
        "largest": meter.largest,
        "shape": meter.shape,
        "heads": length * (query + 2 * key) * config.head_dim,
        "hidden": length * config.hidden_size,
    }


def memory_of_rings(rank: int, world: int, length: int) -> list[Any]:
    """Elements of the largest float tensor with all tokens of a packed sequence; bytes of any, and of a rank's mask."""
    model = tile_model(decoder(num_attention_heads=2, num_key_value_heads=2, head_dim=8), num_shards=3)
    parallelize(model, mesh_of({"dp_shard": 1, "cp": world}), ParallelConfig(data=RING, checkpointing=FULL))
    ids, positions = batch(length)[0][:1], (torch.arange(length) % (length // 3))[None]
    with LargestTensor(length) as meter, LiveBytes() as live:
        model(input_ids=ids, position_ids=positions, labels=ids).loss.backward()
    return [meter.largest, live.largest, length // world * length]


def functions(rank: int, world: int) -> dict[str, Any]:
    """`context_attention` of many shapes against attention on one process, and what `context_slice` gives."""
    found: dict[str, Any] = {"attention": {}, "slice": {}}
    s = 6 * world
    for heads, kv_heads, dim in ((4, 4, 5), (8, 2, 5), (12, 3, 5), (4, 1, 7)):
        generator = torch.Generator().manual_seed(heads)
        q, k, v, dy = (
            torch.randn(2, h, s, d, generator=generator, dtype=torch.float64, requires_grad=True)
            for h, d in ((heads, 5), (kv_heads, 5), (kv_heads, dim), (heads, dim))
        )
        for name, attend in {"causal": None, "window": partial(causal_attention, window=5)}.items():
            whole = (attend or causal_attention)(q, k, v)
            expected = [whole.detach(), *torch.autograd.grad(whole, (q, k, v), dy.detach())]
            own = slice(rank * 6, (rank + 1) * 6)
            mine = [x[:, :, own].detach().requires_grad_() for x in (q, k, v)]
            y = context_attention(*mine, attend)
            got = [y.detach(), *torch.autograd.grad(y, mine, dy[:, :, own])]
            apart = [((a - b[:, :, own]).norm() / b.norm()).item() for a, b in zip(got, expected, strict=True)]
            found["attention"][f"{heads}, {kv_heads}, {dim}, {name}"] = max(apart)
    labels = torch.arange(2 * s).reshape(2, s)
    mine = context_slice({"labels": labels, "input_ids": labels, "nothing": None}, ignore_index=-7)
    found["slice"] = {key: None if value is None else value.tolist() for key, value in mine.items()}
    return found


REFUSED: dict[str, Any] = {
    "heads": ({"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 12}, CONTEXT),
    "pipeline": ({}, DataParallel(context_axis="cp", pipeline=True)),
    "ddp": ({}, DataParallel(engine="ddp", context_axis="cp")),
    "attention": ({"attn_implementation": "flex_attention"}, CONTEXT),
    "rope": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, CONTEXT),
    "no context": ({"own": True}, CONTEXT),
    "dropout": ({"attention_dropout": 0.1}, RING),
    "classifier in a ring": ({"head": "SequenceClassification"}, RING),
    "classifier": ({"head": "SequenceClassification"}, CONTEXT),
}


def refusals(rank: int, world: int) -> dict[str, Any]:
    """What `parallelize` refuses, with the model as it was; then what the forward does, and the functions."""
    from tiled_torch import TiledMLP

    mesh, found = mesh_of({"dp_shard": 1, "cp": world}), {}
    for name, (changes, data) in REFUSED.items():
        changes = dict(changes)
        own, used = changes.pop("own", False), changes.pop("attn_implementation", None)
        classifier = changes.pop("head", None) and LlamaForSequenceClassification(small_config("llama"))
        model: Any = classifier or (TiledMLP(8, 12) if own else decoder(**changes))
        if used:
            model.config._attn_implementation = used
        before = snapshot(model)
        found[name] = [
            *_error(lambda m=model, d=data: parallelize(m, mesh, ParallelConfig(data=d))),
            snapshot(model) == before,
        ]
    model = parallelize(tile_model(decoder()), mesh, ParallelConfig(data=CONTEXT))  # the head's weights are in the root
    ids, labels = batch(12)
    found["batches"] = _error(lambda: model(input_ids=ids[rank : rank + 1]))
    found["tokens"] = _error(lambda: model(input_ids=ids[:, :11]))
    hidden = torch.ones_like(ids)
    hidden[0, 0] = 0
    calls: dict[str, dict[str, Any]] = {
        "positions": {"input_ids": ids, "position_ids": torch.arange(12)},
        "mask": {"input_ids": ids, "attention_mask": hidden},
        "mask of scores": {"input_ids": ids, "attention_mask": torch.zeros(4, 1, 12, 12, dtype=torch.float64)},
        "weights": {"input_ids": ids, "output_attentions": True},
        "keep": {"input_ids": ids, "logits_to_keep": 1},
        "cache": {"input_ids": ids, "use_cache": True},
        "unknown": {"input_ids": ids, "cu_seq_lens_q": torch.tensor([0, 12])},
    }
    loss_function = model.loss_function
    with Collectives() as counted:
        for name, given in calls.items():
            found[name] = _error(lambda given=given: model(**given))
        found["mask, by place"] = _error(lambda: model(ids, hidden))
        model.loss_function = lambda logits, labels, **_: logits.sum()
        found["loss"] = _error(lambda: model(input_ids=ids, labels=labels))
    model.loss_function = loss_function
    with Collectives() as called:
        model(ids, torch.ones_like(ids), labels=labels)
    found["collectives"] = [dict(counted.counts), bool(called.counts)]
    x = torch.ones(1, 3, 4, 5)
    y = torch.ones(1, 2, 3, 4)
    found["odd tokens"] = _error(lambda: ring_attention(y, y, y))
    found["no keys"] = _error(lambda: ring_attention(x, x, x, window=0))
    found["no cap"] = _error(lambda: ring_attention(x, x, x, softcap=0.0))
    other = torch.ones(1, 2, 4 + 2 * rank, 4)
    found["other tokens"] = _error(lambda: ring_attention(other, other, other))
    found["documents"] = _error(lambda: ring_attention(x, x, x, documents=torch.zeros(1, 4, dtype=torch.int64)))
    found["order"] = _error(lambda: context_slice({"labels": ids}, order="zag"))  # type: ignore[arg-type]
    found["runs"] = _error(lambda: context_slice({"labels": ids[:, :10]}, order="zigzag"))
    found["odd heads"] = _error(lambda: context_attention(x, x, x))
    found["shapes"] = _error(lambda: context_attention(x, x[:, :, :2], x))
    found["key heads"] = _error(lambda: context_attention(x, x[:, :2], x[:, :2]))
    found["three dims"] = _error(lambda: context_attention(x[0], x, x))
    found["result"] = _error(lambda: context_attention(*[torch.ones(1, 4, 2, 3)] * 3, lambda q, k, v: q[:, :, :1]))
    found["uneven"] = _error(lambda: context_slice({"labels": ids, "input_ids": ids[:, 1:]}))
    found["no tensor"] = _error(lambda: context_slice({"labels": [1]}))
    return found


def _error(call: Any) -> list[str]:
    try:
        call()
    except (ValueError, TypeError, NotImplementedError) as error:
        return [type(error).__name__, str(error)]
    return ["nothing was refused", ""]


# The heads of Llama-3-8B to each other, and few weights.
WIDE_SIZES = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 16, "num_key_value_heads": 4}


def wide_block(name: str, layers: int, **changes: Any) -> Any:
    """A model whose layers are one function each."""
    torch.manual_seed(0)
    axes, config = CONFIGS[name]
    sizes: dict[str, Any] = WIDE_SIZES | {"num_hidden_layers": layers, "vocab_size": 64} | changes
    model = tile_model(LlamaForCausalLM(LlamaConfig(**sizes)).train(), scope="block", tiling=Tiling(shard_tokens=32))
    return parallelize(model, mesh_of(axes), config)


def bytes_a_token(rank: int, world: int, name: str, layers: int = 2, **changes: Any) -> float:
    """Bytes of one step that one more token of this rank costs, without those in host memory.

    Of each length the lesser of two peaks: a thread of gloo may let go of what was exchanged a moment later.
    """
    found: dict[int, list[int]] = {64: [], 512: [], 1024: []}
    for tokens in (64, 512, 1024, 512, 1024):  # the first of a process has arrays of its own
        model, ids = wide_block(name, layers, **changes), torch.arange(tokens * world)[None] % 64
        host_memory.cache_clear()
        with LiveBytes() as live:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found[tokens].append(live.peak - host_memory(torch.device("cpu")).bytes)
    return (min(found[1024]) - min(found[512])) / 512


class Exchanges(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts exchanges, and the elements of one token that they move."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.count, self.moved = tokens, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.startswith("alltoall_base"):
            self.count += 1
            self.moved += args[1].numel() // self.tokens
        return func(*args, **(kwargs or {}))


def exchanges(rank: int, world: int, name: str, tokens: int = 64, **changes: Any) -> list[int]:
    """Exchanges of one layer, forward and backward, and the elements of each token of a rank in them: between two depths."""
    found = []
    for layers in (1, 2):
        model, ids = wide_block(name, layers, **changes), torch.arange(tokens * world)[None] % 64
        with Exchanges(tokens) as counted:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append((counted.count, counted.moved))
    return [two - one for one, two in zip(*found, strict=True)]
