"""What the ranks run under DeepSpeed's engine: models and modules, and what they gather. See tests/ranks.py."""

import gc
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shared_specs.errors import UnsupportedError
from tests.models.ranks_torch_moe import model_of as experts_model
from tests.models.torch_decoders import VOCAB, batch, decoder, truth
from tests.plans.ranks_torch_plans import error_between
from tiled_torch.models import tile_model, tiling_paths, untile_model
from tiled_torch.modules import TiledLinear, TiledLinearCrossEntropy, TiledMLP
from tiled_torch.tile.api import tile

# DeepSpeed looks for kernels of its own and for a launcher otherwise.
os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2", "CCL_LOCAL_SIZE": "2"}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import deepspeed  # type: ignore[import-not-found]
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus  # type: ignore[import-not-found]
    from deepspeed.utils import groups, logger, safe_get_full_grad  # type: ignore[import-not-found]

logger.setLevel("ERROR")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
SHARDS = 3
EXPERTS = "gpt_oss"


@contextmanager
def engines() -> Iterator[None]:
    """Without DeepSpeed's own warnings; what it keeps of a process group goes with the group."""
    os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            groups._release_process_group_references(group=None)
            deepspeed.comm.comm.cdb = None
            gc.collect()


def settings(stage: int, *, bf16: bool = False, offload: bool = False, accumulate: int = 1) -> dict[str, Any]:
    """Every parameter is partitioned, however small, and gathered when it is needed, not before."""
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": False, "stage3_prefetch_bucket_size": 0}
    zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulate,
        "zero_optimization": zero | ({"offload_optimizer": {"device": "cpu"}} if offload else {}),
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bf16},
    }


def engine_of(model: nn.Module, config: dict[str, Any]) -> Any:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


class Gathers:
    """Counts, by name, how often each parameter is gathered, and looks which gathered memory outlives its release.

    most: elements of those whose names begin with `within` that were gathered at once.
    """

    def __init__(self, model: nn.Module, within: str = "") -> None:
        self.counts: Counter[str] = Counter()
        self.names = {id(p): name for name, p in model.named_parameters() if hasattr(p, "ds_id")}
        self.parameters: list[Any] = [p for p in model.parameters() if hasattr(p, "ds_id")]
        self.within, self.gathered, self.most = within, 0, 0
        self.released: list[StorageWeakRef] = []

    def __enter__(self) -> Self:
        wraps = {"all_gather": self._gather, "all_gather_coalesced": self._gather, "partition": self._release}
        self.before = [(p, name, getattr(p, name)) for p in self.parameters for name in wraps]
        for parameter, name, method in self.before:
            setattr(parameter, name, wraps[name](parameter, method))
        return self

    def __exit__(self, *_: object) -> None:
        for parameter, name, method in self.before:
            setattr(parameter, name, method)

    def _gather(self, parameter: Any, method: Callable[..., Any]) -> Callable[..., Any]:
        def gather(param_list: Any = None, *args: Any, **kwargs: Any) -> Any:
            wanted = [parameter] if param_list is None else list(param_list)
            for p in wanted:
                if p.ds_status == ZeroParamStatus.NOT_AVAILABLE:
                    self.counts[self.names[id(p)]] += 1
                    self.gathered += p.ds_numel * self.names[id(p)].startswith(self.within)
            self.most = max(self.most, self.gathered)
            return method(wanted, *args, **kwargs)

        return gather

    def _release(self, parameter: Any, method: Callable[..., Any]) -> Callable[..., Any]:
        def release(param_list: Any = None, *args: Any, **kwargs: Any) -> Any:
            for p in [parameter] if param_list is None else param_list:
                if p.ds_status == ZeroParamStatus.AVAILABLE:
                    self.released.append(StorageWeakRef(p.data.untyped_storage()))
                    self.gathered -= p.ds_numel * self.names[id(p)].startswith(self.within)
            return method(*([] if param_list is None else [param_list]), *args, **kwargs)

        return release

    def outlived(self) -> int:
        """How many releases freed nothing, once gloo's threads have let go of what they sent."""
        gc.collect()
        deadline = time.monotonic() + 10
        while (alive := sum(not ref.expired() for ref in self.released)) and time.monotonic() < deadline:
            time.sleep(0.01)
        return alive


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """By name; None where there is none."""
    return {name: safe_get_full_grad(p) for name, p in model.named_parameters() if p.requires_grad}


class LoRA(nn.Module):
    """What peft makes of a projection: it frozen, and two small ones beside it."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, options = base.requires_grad_(False), {"bias": False, "dtype": base.weight.dtype}
        self.a = nn.Linear(base.in_features, 2, **options)
        self.b = nn.Linear(2, base.out_features, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def with_lora(model: Any) -> Any:
    """Adapters of the MLPs and of one projection of attention; all else is frozen."""
    model.requires_grad_(False)
    for layer in model.model.layers:
        for module, names in ((layer.mlp, ("gate_proj", "up_proj", "down_proj")), (layer.self_attn, ("q_proj",))):
            for name in names:
                setattr(module, name, LoRA(getattr(module, name)))
    return model


def model_of(kind: str = "llama", checkpoint: str = "", trains: str = "all", tied: bool = False) -> Any:
    """trains: "all", "lora" or "mlp"."""
    torch.manual_seed(0)
    model = experts_model().float() if kind == EXPERTS else decoder(kind, tie_word_embeddings=tied).float()
    if trains == "lora":
        with_lora(model)
    for name, parameter in model.named_parameters() if trains == "mlp" else ():
        parameter.requires_grad_(".mlp." in name)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint == "reentrant"})
        model.enable_input_require_grads()
    return model


def step(engine: Any, rank: int, world: int, accumulate: int) -> dict[str, Any]:
    """One step of the optimizer: loss, gradients, and what was gathered for them."""
    ids, labels = (part[rank::world] for part in batch())
    with Gathers(engine.module) as gathers:
        for shift in range(accumulate):
            outputs = engine(input_ids=ids.roll(shift), labels=labels.roll(shift), use_cache=False)
            outlived = gathers.outlived()
            engine.backward(outputs.loss)
            if shift == accumulate - 1:
                found = gradients(engine.module)
            engine.step()
    assert all(gradient is not None for gradient in found.values())
    made = getattr(getattr(outputs.logits, "values_of", None), "made", None)
    return {
        "loss": outputs.loss.item(),
        "gradients": found,
        "gathers": dict(gathers.counts),
        "outlived": outlived,
        "logits": made is not None,
    }


def both(
    rank: int,
    world: int,
    stage: int,
    kind: str = "llama",
    checkpoint: str = "",
    trains: str = "all",
    tied: bool = False,
    accumulate: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Three steps of the same model, untiled and tiled: how far apart they are, and what each gathers.

    The shards are not as many on each rank. exact: how far the first gradients of either are from float64.
    """
    answers = []
    config = settings(stage, accumulate=accumulate, **options)
    with engines():
        for tiled in (False, True):
            model = model_of(kind, checkpoint, trains, tied)
            engine = engine_of(tile_model(model, num_shards=SHARDS + rank) if tiled else model, config)
            answers.append([step(engine, rank, world, accumulate) for _ in range(3)])
            paths = tiling_paths(model)
    plain, found = answers
    pairs = list(zip(found, plain, strict=True))
    exact = {} if kind == EXPERTS else truth(kind, tie_word_embeddings=tied)[1]
    return {
        "loss": max(abs(ours["loss"] - theirs["loss"]) / theirs["loss"] for ours, theirs in pairs),
        "error": max(error_between(ours["gradients"], theirs["gradients"]) for ours, theirs in pairs),
        "exact": [error_between(one[0]["gradients"], exact) for one in (found, plain)],
        "gathers": [(theirs["gathers"], ours["gathers"]) for ours, theirs in pairs],
        "outlived": [ours["outlived"] for ours in found],
        "logits": any(ours["logits"] for ours in found),
        "paths": paths,
    }


class Net(nn.Module):
    """The modules themselves: an MLP on an input that needs no gradient, a fused one, a wide layer in tiles, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = TiledMLP(8, 12, bias=True, num_shards=SHARDS)
        self.second = TiledMLP(8, 12, fused_gate_up=True, activation="gelu", num_shards=SHARDS)
        self.wide = TiledLinear(8, 20, in_splits=2, out_splits=2)
        self.head = TiledLinearCrossEntropy(20, VOCAB, num_shards=SHARDS)

    def forward(self, x: Tensor, targets: Tensor) -> Any:
        return self.head(self.wide(self.second(self.first(x))), targets)


def untiled(weights: dict[str, Tensor], x: Tensor, targets: Tensor) -> Tensor:
    """The loss of Net by its formulas."""
    w = weights
    up, gate = F.linear(x, w["first.w_up"], w["first.b_up"]), F.linear(x, w["first.w_gate"], w["first.b_gate"])
    x = F.linear(F.silu(gate) * up, w["first.w_down"], w["first.b_down"])
    gate, up = F.linear(x, w["second.w_gate_up"]).chunk(2, -1)
    x = F.linear(F.gelu(gate) * up, w["second.w_down"])
    rows = [torch.cat([w[f"wide.linears.{j}.{i}.weight"] for i in range(2)], 1) for j in range(2)]
    bias = torch.cat([w[f"wide.linears.{j}.1.bias"] for j in range(2)])
    x = F.linear(x, torch.cat(rows), bias)
    return F.cross_entropy(F.linear(x, w["head.weight"]), targets)


def modules(rank: int, world: int, stage: int, *, inside: bool) -> dict[str, Any]:
    """Net against its formulas. inside: made, drawn anew and copied inside deepspeed.zero.Init."""
    torch.manual_seed(rank)  # whose values count is rank 0
    with engines():
        config = settings(stage)
        context = deepspeed.zero.Init(config_dict_or_path=config) if inside else nullcontext()
        with context:
            net = Net()
            plain = nn.Linear(8, 20)
            for module in (net.first, net.wide, net.head):
                module.reset_parameters()
        if not inside:
            for parameter in net.parameters():
                torch.distributed.broadcast(parameter.data, 0)
        with deepspeed.zero.GatheredParameters(list(net.parameters()), enabled=inside):
            weights = {name: p.detach().double().clone().requires_grad_() for name, p in net.named_parameters()}
        with context:
            copy = TiledLinear.from_linear(plain, in_splits=3, out_splits=2)
        whole = copy.to_linear()
        with deepspeed.zero.GatheredParameters(list(plain.parameters()), enabled=inside):
            copied = [torch.equal(a, b) for a, b in zip(whole.parameters(), plain.parameters(), strict=True)]
        texts = [repr(net.head), repr(net.wide)]
        engine = engine_of(net, config)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(4, 6, 8, generator=generator)
        targets = torch.randint(VOCAB, (4, 6), generator=generator)
        with Gathers(net, within="wide.") as gathers:
            loss = engine(x[rank::world].flatten(0, 1), targets[rank::world].flatten())
            outlived = gathers.outlived()
            engine.backward(loss)
        found = gradients(net)
    expected = untiled(weights, x.double().flatten(0, 1), targets.flatten())
    expected.backward()
    return {
        "error": error_between(found, {name: w.grad for name, w in weights.items() if w.grad is not None}),
        "copied": copied,
        "drawn": {name: w.abs().max().item() for name, w in weights.items()},
        "gathers": dict(gathers.counts),
        "most": gathers.most,
        "outlived": outlived,
        "texts": texts,
    }


def refused(call: Callable[[], Any]) -> str:
    """What is said of a call that is refused; nothing of one that is not."""
    try:
        call()
    except UnsupportedError as error:
        return str(error)
    return ""


def in_use(rank: int, world: int) -> dict[str, Any]:
    """Evaluation, logits, training after it, gradients of logits and of two calls at once, of a model untiled and tiled.

    It is tiled when it has its engine already; and untiled again at the end.
    """
    answers = []
    ids, labels = (part[rank::world] for part in batch())
    with engines():
        for tiled in (False, True):
            model = model_of()
            engine = engine_of(model, settings(3))
            if tiled:
                tile_model(model, num_shards=SHARDS)
            call = partial(engine, input_ids=ids, labels=labels, use_cache=False)
            losses = [step(engine, rank, world, 1)["loss"]]
            with torch.no_grad():
                engine.eval()
                outputs = call()
                seen, evaluated = outputs.logits + 0, outputs.loss
                engine.train()
            losses.append(step(engine, rank, world, 1)["loss"])
            outputs = call()
            engine.backward(outputs.loss + outputs.logits.square().mean() + call(input_ids=ids.flip(1)).loss)
            found = gradients(model)
            engine.step()
            untile_model(model)
            losses.append(step(engine, rank, world, 1)["loss"])
            answers.append((torch.stack([evaluated, *map(torch.tensor, losses)]), seen, found))
    (losses, seen, found), (expected, logits, wanted) = answers[1], answers[0]
    return {
        "losses": float((losses - expected).norm() / expected.norm()),
        "logits": float((seen - logits).norm() / logits.norm()),
        "error": error_between(found, wanted),
    }


class Experts(nn.Module):
    """A module of one's own that tiles what is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return tile(lambda x: self.one(x) * self.other(x).tanh(), num_shards=SHARDS)(x)


def own_modules(rank: int, world: int, *, leaf: bool) -> dict[str, Any]:
    """`tile` in a module's forward; with its owner a leaf of the engine, or not."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
    with engines():
        model = nn.Sequential(nn.Linear(8, 8), Experts())
        weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        if leaf:
            deepspeed.utils.set_z3_leaf_modules(model, [Experts])
        engine = engine_of(model, settings(3))
        with Gathers(model) as gathers:
            said = refused(lambda: tile(model[1], num_shards=2)(x))
            if not leaf:
                return {"outside": said, "inside": refused(lambda: engine(x)), "gathers": dict(gathers.counts)}
            engine.backward(engine(x[rank::world]).square().mean())
        found = gradients(model)
    h = F.linear(x, weights["0.weight"], weights["0.bias"])
    pair = [F.linear(h, weights[f"1.{name}.weight"], weights[f"1.{name}.bias"]) for name in ("one", "other")]
    (pair[0] * pair[1].tanh()).square().mean().backward()
    error = error_between(found, {name: w.grad for name, w in weights.items() if w.grad is not None})
    return {"outside": said, "error": error, "gathers": dict(gathers.counts)}


def refusals(rank: int, world: int) -> dict[str, str]:
    """What is said of what cannot work. gathered: how much was before the head was refused."""
    ids, labels = (part[rank::world] for part in batch())
    with engines():
        model = model_of(trains="lora")
        engine_of(model, settings(3))
        said = {"tile": refused(lambda: tile_model(model))}

        model = model_of(trains="lora")
        tile_model(model, num_shards=SHARDS)
        engine_of(model, settings(3))
        said["untile"] = refused(lambda: untile_model(model))

        model = model_of()
        tile_model(model, num_shards=SHARDS)
        engine = engine_of(model, settings(3))
        handle = model.lm_head.register_forward_hook(lambda *_: None)
        with Gathers(model) as gathers:
            said["head"] = refused(lambda: engine(input_ids=ids, labels=labels))
        said["gathered"] = str(sum(gathers.counts.values()))
        handle.remove()

        model = model_of(trains="lora")
        tile_model(model, num_shards=SHARDS)
        for layer in model.model.layers:
            layer.self_attn.q_proj.requires_grad_(False)
        engine = engine_of(model, settings(3))
        said["frozen"] = refused(lambda: engine(input_ids=ids, labels=labels))
    return said
