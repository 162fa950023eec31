"""What the ranks run for `parallelize`: what a tiled loss gathers, bfloat16, embeddings, other heads than for language."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import LlamaForSequenceClassification, LlamaModel

from shared_specs import SpecError
from shared_specs.config import DataParallel, LossOptions, ParallelConfig, TensorParallel
from tests.mlp.ranks_torch_engines import Collectives
from tests.models.torch_decoders import BATCH, VOCAB, batch, decoder, exact, loss_of, small_config, truth
from tests.plans.ranks_torch_plans import CONFIGS, compare, error_between, filled, full, mesh_of, rows_of
from tiled_torch import TiledLinearCrossEntropy
from tiled_torch.models import tile_model
from tiled_torch.parallel import parallelize
from tiled_torch.plans.tensor_styles import Embedding

HIDDEN, SHARDS = 16, 5


class Gathered(TorchDispatchMode):
    """Elements of the largest result of a gather or an exchange between ranks, by whichever of PyTorch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.replace("_", "")
        if "c10d" in func.namespace and ("gather" in name or "alltoall" in name or "broadcast" in name):
            sizes = [a.numel() for a in tree_iter((args, kwargs, out)) if isinstance(a, Tensor)]
            self.largest = max(self.largest, *sizes)
        return out


def loss_gathers(rank: int, world: int, length: int = 10) -> dict[str, Any]:
    """Elements that the loss of a sequence-parallel model gathers at once, and its errors: of `TiledLinearCrossEntropy`, of a
    tiled Llama, and of a result for every token, for which all of x is."""
    mesh, config = mesh_of(("tp",), world), ParallelConfig(tensor=TensorParallel())
    x = torch.randn(BATCH, length, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    targets = batch(length)[1]
    found = {}
    for name, options in (("module", LossOptions()), ("each token", LossOptions(reduction="none"))):
        head, split = (filled(TiledLinearCrossEntropy(HIDDEN, VOCAB, loss=options, num_shards=SHARDS)) for _ in "12")
        parallelize(split, mesh, config)
        own, whole = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_(), x.clone().requires_grad_()
        head(whole, targets).sum().backward()
        with Gathered() as gathered:
            split(own, targets).sum().backward()
        ours = {"x": full(own.grad), "weight": full(split.weight.grad)}
        found[name] = [gathered.largest, error_between(ours, {"x": whole.grad, "weight": head.weight.grad})]
    model = parallelize(tile_model(decoder(), num_shards=SHARDS), mesh, config)
    found["llama"] = [_gathered_by_loss(model, length), compare(mesh, config, True, "llama", length)["gradients"]]
    return found


def _gathered_by_loss(model: Any, length: int) -> int:
    plain, gathered = model._linear_loss, Gathered()

    def measured(*args: Any) -> Tensor:
        with gathered:
            return plain(*args)

    model._linear_loss = measured
    loss_of(model, *batch(length), inside=True).backward()
    return gathered.largest


def bfloat16(rank: int, world: int, names: list[str], tiled: bool | str) -> dict[str, Any]:
    """Errors of loss and gradients against float64, and those of one untiled process in bfloat16. Weights are bfloat16, or
    float32 ones that `fully_shard` gathers in bfloat16."""
    exact_loss, exact_gradients = truth("llama")
    baseline = decoder().bfloat16()
    plain = loss_of(baseline, *batch(), inside=False)
    plain.backward()
    plain_gradients = {name: p.grad.double() for name, p in baseline.named_parameters()}
    limits = [abs(plain.item() - exact_loss) / exact_loss, error_between(plain_gradients, exact_gradients)]
    found = {}
    for name in names:
        axes, config = CONFIGS[name]
        sharded = config.data is not None
        model = decoder().float() if sharded else decoder().bfloat16()
        if sharded:
            config = ParallelConfig(tensor=config.tensor, data=DataParallel(param_dtype="bfloat16"))
        if tiled:
            tile_model(model, num_shards=3, scope="block" if tiled == "block" else "mlp")
        mesh = mesh_of(axes, world)
        model = parallelize(model, mesh, config)
        ids, labels = batch()
        rows = rows_of(mesh, config)
        loss = loss_of(model, ids[rows], labels[rows], inside=bool(tiled) or config.tensor is not None)
        loss.backward()
        mean = loss.detach().double()
        torch.distributed.all_reduce(mean)
        kept = sorted({str(p.grad.dtype) for p in model.parameters()})
        gradients = {key: full(p.grad).double() for key, p in model.named_parameters()}
        errors = [abs(mean.item() / world - exact_loss) / exact_loss, error_between(gradients, exact_gradients)]
        found[name] = {"errors": errors, "baseline": limits, "gradients": kept}
    return found


class Mean(nn.Module):
    """The mean square of what a model returns first."""

    @staticmethod
    def of(model: Any, ids: Tensor) -> Tensor:
        return model(input_ids=ids, use_cache=False)[0].square().mean()


def other_heads(rank: int, world: int, names: list[str]) -> dict[str, float]:
    """A sequence classifier and a bare decoder: gradients against one process."""
    found = {}
    ids = batch()[0].clamp(min=1)  # none is padding
    for kind in (LlamaForSequenceClassification, LlamaModel):
        build = lambda kind=kind: filled(exact(kind(small_config("llama", num_labels=3))))  # noqa: E731
        alone = build()
        Mean.of(alone, ids).backward()
        expected = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
        for name in names:
            axes, config = CONFIGS[name]
            mesh = mesh_of(axes, world)
            model = parallelize(build(), mesh, config)
            Mean.of(model, ids[rows_of(mesh, config)]).backward()
            grads = {key: full(p.grad) for key, p in model.named_parameters()}
            found[f"{kind.__name__} {name}"] = error_between(grads, expected)
            assert any(isinstance(p, DTensor) for p in model.parameters())
    return found


def ties(rank: int, world: int) -> dict[str, list[bool]]:
    """Whether embedding and head are one parameter after the split, for models whose configuration says something else."""
    found = {}
    for name, told in (("tied by hand", False), ("untied by hand", True)):
        model = decoder(tie_word_embeddings=told)
        if told:
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        else:
            model.lm_head.weight = model.model.embed_tokens.weight
        parallelize(model, mesh_of(("tp",), world), ParallelConfig(tensor=TensorParallel()))
        found[name] = model.lm_head.weight is model.model.embed_tokens.weight
    return found


def embeddings(rank: int, world: int, vocab: int, tokens: int) -> dict[str, Any]:
    """An embedding split by a vocabulary that ranks do not divide, with a padding entry: errors, rows held, and collectives of
    backward; and what is said of an id outside the vocabulary."""
    mesh, found = mesh_of(("tp",), world), {}
    ids = torch.arange(2 * tokens).reshape(2, tokens) % vocab
    upstream = torch.randn(*ids.shape, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for layout in (Replicate(), Shard(1)):
        plain, split = (filled(nn.Embedding(vocab, HIDDEN, padding_idx=1)) for _ in "12")
        plain(ids).backward(upstream)
        parallelize_module(split, mesh, Embedding(layout))
        y, own = split(ids), distribute_tensor(upstream, mesh, [layout])
        with Collectives() as collectives:
            y.backward(own)
        found[str(layout)] = {
            "y": error_between({"y": y.detach().full_tensor()}, {"y": plain(ids).detach()}),
            "dw": error_between({"dw": full(split.weight.grad)}, {"dw": plain.weight.grad}),
            "rows": list(split.weight.grad.to_local().shape),
            "collectives": dict(collectives.counts),
        }
    try:
        split(ids + 1)
    except SpecError as error:
        found["outside"] = str(error)
    return found


def long_embeddings(rank: int, world: int, tokens: int) -> dict[str, Any]:
    """An embedding of more tokens than a shard has, split along them: errors in float64, how often and how much at once is
    gathered in backward, and the error of a gradient in bfloat16 beside that of all tokens at once."""
    mesh, found, vocab = mesh_of(("tp",), world), {}, 5
    ids = torch.randint(vocab, (2, tokens), generator=torch.Generator().manual_seed(2))
    upstream = torch.randn(*ids.shape, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16().double()
    plain = filled(nn.Embedding(vocab, HIDDEN, padding_idx=1))
    plain(ids).backward(upstream)
    for dtype in (torch.float64, torch.bfloat16):
        whole, split = (filled(nn.Embedding(vocab, HIDDEN, padding_idx=1)).to(dtype) for _ in "12")
        parallelize_module(split, mesh, Embedding(Shard(1)))
        y, own = split(ids), distribute_tensor(upstream.to(dtype), mesh, [Shard(1)])
        with Collectives() as collectives, Gathered() as gathered:
            y.backward(own)
        whole(ids).backward(upstream.to(dtype))
        found[str(dtype)] = {
            "y": error_between({"y": y.detach().full_tensor().double()}, {"y": whole(ids).detach().double()}),
            "own": list(y.to_local().shape),
            "dw": error_between({"dw": full(split.weight.grad).double()}, {"dw": plain.weight.grad}),
            "dw of all at once": error_between({"dw": whole.weight.grad.double()}, {"dw": plain.weight.grad}),
            "gathered": [dict(collectives.counts), gathered.largest],
        }
    return found
