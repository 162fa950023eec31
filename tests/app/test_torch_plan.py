"""`plan` beside the PyTorch half's own step over simulated ranks: what it predicts and what is held."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from shared_specs.app.plan.decoder import decoder_of
from shared_specs.app.plan.step import RESERVE, Setting, parts_of
from shared_specs.tolerances import PLAN_BYTES
from tests.core.torch_counting import HeldBytes
from tiled_torch import Checkpointing, DataParallel, ParallelConfig, Tiling, parallelize, tile_model

RANKS = 8


@pytest.fixture
def simulated_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # transformers takes fake tensors for tracing and makes a whole [S, S] mask that it makes for nobody else.
    for module in (modeling_llama, modeling_qwen3):
        monkeypatch.setattr(module, "create_causal_mask", lambda **_: None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def held(config: Any, setting: Setting) -> int:
    """Bytes at the peak of a step of rank 0, the optimizer's aside."""
    sizes = {"dp_shard": RANKS // setting.context} | ({"cp": setting.context} if setting.context > 1 else {})
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    data = DataParallel(
        param_dtype=None if setting.dtype == "float32" else setting.dtype,
        context_axis="cp" if setting.context > 1 else None,
    )
    if setting.context > 1:  # not under fake tensors, which have no coordinates
        mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        if setting.scope != "none":
            tile_model(model, scope=setting.scope, tiling=Tiling(shard_tokens=setting.shard_tokens))
        model = parallelize(model.train(), mesh, ParallelConfig(checkpointing=Checkpointing(), data=data))
        ids = torch.zeros(setting.sequences, setting.tokens, dtype=torch.long)  # whole on every rank of a context
        with HeldBytes(p.to_local() for p in model.parameters()) as step:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return step.peak


def assert_predicted(config: Any, setting: Setting) -> None:
    found = held(config, setting)
    parts = parts_of(decoder_of(config.to_dict(), "the test's"), setting)
    predicted = parts.total - RESERVE
    print(f"{predicted / found:.3f}", found, parts.by_name)
    assert predicted == pytest.approx(found, rel=PLAN_BYTES)


LAYERS, HEAD = 256, 32000  # entries of the vocabulary with which a layer or the loss is the peak


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of fully_shard on fake tensors
@pytest.mark.parametrize(
    ("scope", "context", "dtype", "vocab"),
    [
        ("block", 1, "bfloat16", LAYERS),
        ("block", 1, "float32", HEAD),
        ("block", 2, "float32", LAYERS),
        ("block", 4, "bfloat16", LAYERS),
        ("block", 8, "bfloat16", HEAD),
        ("mlp", 1, "bfloat16", LAYERS),
        ("mlp", 1, "float32", LAYERS),
        ("mlp", 4, "bfloat16", HEAD),
        ("mlp", 4, "float32", LAYERS),
        ("none", 1, "bfloat16", LAYERS),
        ("none", 1, "float32", LAYERS),
        ("none", 1, "bfloat16", HEAD),
    ],
)
def test_bytes_of_a_step(scope: Any, context: int, dtype: str, vocab: int, simulated_ranks: None) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1792, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=3, vocab_size=vocab)
    setting = Setting(
        tokens=4096 * context, gpus=RANKS, context=context, scope=scope, dtype=dtype, shard_tokens=1024, optimizer="sgd",
        device="cpu",
    )  # fmt: skip
    assert_predicted(config, setting)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of fully_shard on fake tensors
def test_a_million_tokens(simulated_ranks: None) -> None:
    """Two layers of Qwen3-8B, 1,048,576 tokens over a context of eight."""
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = transformers.Qwen3Config(**sizes, head_dim=128, num_hidden_layers=2, vocab_size=151936)
    setting = Setting(tokens=2**20, gpus=RANKS, context=RANKS, shard_tokens=8192, optimizer="sgd", device="cpu")
    assert_predicted(config, setting)
