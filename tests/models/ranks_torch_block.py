"""What two ranks run of `tile_model(scope="block")`: engines around every layer. See tests/ranks.py."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from shared_specs.config import Checkpointing, Compile, DataParallel, ParallelConfig, TensorParallel, Tiling
from shared_specs.core.rounding import relative_error
from tests.core.torch_counting import GemmFlop, LiveBytes
from tests.mlp.ranks_torch_engines import Collectives
from tests.models.torch_decoders import VOCAB, batch, decoder
from tests.plans.ranks_torch_plans import CONFIGS, compare, error_between, full, mesh_of, models
from tiled_torch import tile_model, tiling_paths
from tiled_torch.models.block.host_memory import host_memory
from tiled_torch.parallel import parallelize
from tiled_torch.plans import registry
from tiled_torch.plans.decoder import HEAD_NORMS, decoder_plan


def scaled(rank: int, world: int, **changes: Any) -> dict[str, Any]:
    """Layers whose weights are split, as by a plan of one's own, and whose queries are scaled."""
    builders: Any = registry._BUILDERS
    with patch.dict(HEAD_NORMS, ministral3=None), patch.dict(builders, ministral3=decoder_plan):  # type: ignore[arg-type]
        return models(rank, world, ["tp", "sp"], tiled="block", kind="ministral3", length=9, **changes)


def sharded(rank: int, world: int, engine: str, checkpointing: bool) -> dict[str, Any]:
    """Two micro-batches, gradients of the mean over ranks, against one process; and what each layer ran.

    engine: "layers", fully_shard by hand around each; "fsdp" and "ddp" are those of `parallelize`, with offloaded inputs where
    `checkpointing`.
    """
    torch.manual_seed(0)
    plain: Any = decoder()
    ids, _ = batch()
    with torch.no_grad():
        state = {name: p.clone() for name, p in plain.state_dict().items()}
    loss_of(plain, ids).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    model: Any = decoder()
    model.load_state_dict(state)
    if checkpointing and engine == "layers":
        model.activation_checkpointing_enable({"use_reentrant": False})
    tile_model(model, scope="block", num_shards=2 + rank)
    if engine == "layers":
        layers: list[nn.Module] = list(model.model.layers)
        for unit in (*layers, model):
            fully_shard(unit)
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
        data = DataParallel(engine="ddp" if engine == "ddp" else "fsdp", reduce_dtype=None)
        recomputed = Checkpointing(offload=True) if checkpointing else None
        model = parallelize(model, mesh, ParallelConfig(data=data, checkpointing=recomputed))
    own = ids.chunk(world)[rank]
    for part in own.chunk(2):
        loss_of(model, part, scale=len(part) * world / len(ids)).backward()
    found = {name.removeprefix("module."): full(p.grad) for name, p in model.named_parameters()}
    model = getattr(model, "module", model)
    paths = {path for name, path in tiling_paths(model).items() if name.rsplit(".", 1)[-1].isdigit()}
    return {"error": error_between(found, expected), "paths": sorted(paths)}


def counts(rank: int, world: int, sequence_parallel: bool, tokens: int, shards: int) -> dict[str, Any]:
    """FLOP and collectives of one layer whose weights are split, forward and backward: the difference of two depths."""
    mesh, found = mesh_of(("tp",), world), []
    ids = torch.arange(2 * tokens).reshape(2, tokens) % VOCAB
    for layers in (1, 2):
        model: Any = tile_model(decoder(num_hidden_layers=layers), scope="block", num_shards=shards)
        tensor = TensorParallel(sequence_parallel=sequence_parallel)
        parallelize(model, mesh, ParallelConfig(tensor=tensor))
        for _ in range(2):  # the first time ranks compare their calls
            with warnings.catch_warnings(), GemmFlop() as flop, Collectives() as moved:
                warnings.simplefilter("ignore", UserWarning)  # of a loss past the tiled one
                hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state.to_local()
                (hidden * hidden.cos()).sum().backward()
        found.append((flop.flop, moved.counts))
    (flop_of_one, moved_by_one), (flop_of_two, moved_by_two) = found
    return {"flop": flop_of_two - flop_of_one, "moved": dict(moved_by_two - moved_by_one)}


def compiled(rank: int, world: int, name: str) -> Any:
    """As `compare`, layers and ends compiled as a configuration asks."""
    whole = torch.compile
    torch.compile = partial(whole, backend="aot_eager")  # type: ignore[assignment]
    warnings.simplefilter("ignore")  # the compiler's own
    try:
        axes, config = CONFIGS[name]
        config = replace(config, compile=Compile(ends=True))
        return compare(mesh_of(axes, world), config, "block", "llama", 10)
    finally:
        torch.compile = whole
        warnings.simplefilter("error")


def stopped(rank: int, world: int) -> dict[str, Any]:
    """What layers do whose weights are split where they cannot run as one: without gradients, with a hook, with other shards.

    The values are those of one process.
    """
    mesh, (ids, _) = mesh_of(("tp",), world), batch()
    plain: Any = decoder()
    expected = plain(input_ids=ids, use_cache=False).logits
    model: Any = tile_model(decoder(), scope="block", num_shards=3)
    parallelize(model, mesh, ParallelConfig(tensor=TensorParallel()))
    found: dict[str, Any] = {}

    def ran(name: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            logits = model(input_ids=ids, use_cache=False).logits
        found[name] = [relative_error(full(logits).detach().numpy(), expected.detach().numpy()), layer_paths(model)]

    ran("as one")
    with torch.no_grad():
        ran("no gradient")
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    ran("hook")
    handle.remove()
    model.model.layers[0]._block_tiling = Tiling(num_shards=2 + rank)
    try:
        model(input_ids=ids, use_cache=False)
    except Exception as error:
        found["shards"] = [type(error).__name__, str(error)]
    return found


def layer_paths(model: Any) -> list[str]:
    return sorted({path for name, path in tiling_paths(model).items() if name.rsplit(".", 1)[-1].isdigit()})


def peak(rank: int, world: int, sequence_parallel: bool, offload: bool, layers: int, tokens: int) -> int:
    """Bytes of one step, without those in host memory, of a decoder with the heads of Llama-3-8B."""
    mesh = mesh_of(("tp",), world)
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 16, "num_key_value_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=64)
    model = LlamaForCausalLM(config).train()
    tile_model(model, scope="block", tiling=Tiling(shard_tokens=32))
    tensor = TensorParallel(sequence_parallel=sequence_parallel)
    parallelize(model, mesh, ParallelConfig(tensor=tensor, checkpointing=Checkpointing(offload=offload)))
    ids = torch.arange(tokens)[None] % 64
    host_memory.cache_clear()
    with LiveBytes() as live:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return live.peak - host_memory(torch.device("cpu")).bytes


def loss_of(model: Any, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """A mean over rows of a function of the logits, in the model's own dtype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a loss past the tiled one, which this is
        logits = model(input_ids=ids, use_cache=False).logits
    return scale * (logits * logits.cos()).mean()
