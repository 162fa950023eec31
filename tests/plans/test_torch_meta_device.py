"""`materialize` in one process: given weights, drawn ones, tied ones, buffers, and what it refuses; simulated ranks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shared_specs.config import DataParallel, ParallelConfig
from shared_specs.errors import SpecError
from tests.models.torch_decoders import batch, decoder, loss_of
from tiled_torch import parallelize, tile_model
from tiled_torch.parallel import materialize


def empty(build: Any) -> Any:
    with torch.device("meta"):
        return build()


def test_given_weights_and_computed_buffers() -> None:
    """The angles of positions are buffers that no state dict holds."""
    plain = decoder(tie_word_embeddings=True)
    weights = dict(plain.named_parameters())
    model = materialize(empty(lambda: decoder(tie_word_embeddings=True)), weights=weights)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(loss_of(model, *batch(), inside=True), loss_of(plain, *batch(), inside=True))


def test_drawn_weights_depend_on_the_seed_and_the_name() -> None:
    build = lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))  # noqa: E731
    first, again, other = (materialize(empty(build), seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True))
    assert not torch.equal(first[0].weight, other[0].weight)
    assert not torch.equal(first[0].weight, first[1].weight)
    assert torch.equal(first[2].running_var, torch.ones(4))


class Bare(nn.Module):
    """Says nothing of how it is initialised."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class Half(Bare):
    """Forgets its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(3.0))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


class Forgetful(Bare):
    def reset_parameters(self) -> None:
        pass


@pytest.mark.parametrize(
    ("build", "given", "words"),
    [
        (Bare, None, "Bare must be a module that initialises itself, got Bare"),
        (Forgetful, None, "scale was not set by its module. Set it in reset_parameters"),
        (Half, None, "angles was not set by its module. Set it in reset_parameters"),
        (Half, {"scale": torch.ones(3)}, "angles was not set by its module. Set it in reset_parameters"),
        (Forgetful, {}, "weights has none for the parameter scale. Give one for every parameter."),
        (
            Forgetful,
            {"scale": torch.ones(3), "x": torch.ones(3)},
            "weights has one for no parameter: x. Give one for every parameter.",
        ),
        (Forgetful, {"scale": torch.ones(4)}, r"weights\['scale'\] must be of shape \[3\], got \[4\]"),
    ],
)
def test_refused(build: Any, given: Any, words: str) -> None:
    with pytest.raises(SpecError, match=f"^materialize: {words}"):
        materialize(empty(build), weights=given)


def test_given_weights_need_no_initialisation() -> None:
    model = materialize(empty(Forgetful), weights={"scale": torch.arange(3.0)})
    assert torch.equal(model.scale, torch.arange(3.0))


@pytest.fixture
def eight_ranks() -> Iterator[DeviceMesh]:
    """A simulation of them, in which nobody answers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (8,), mesh_dim_names=("dp_shard",))
    dist.destroy_process_group()


@pytest.mark.deep_but(1)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of fully_shard on fake tensors
@pytest.mark.parametrize("scope", ["mlp", "block"])
def test_a_model_of_any_size_over_simulated_ranks(scope: str, eight_ranks: DeviceMesh) -> None:
    """Llama-3-8B's widths in fake tensors: its step can be measured where neither its weights nor its ranks are."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=128256)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = tile_model(transformers.LlamaForCausalLM(config).train(), scope=scope)
        model = parallelize(model, eight_ranks, ParallelConfig(data=DataParallel(param_dtype="bfloat16")))
        ids = torch.zeros(1, 256, dtype=torch.long)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for parameter in model.parameters():
        assert parameter.grad.to_local().numel() == parameter.numel() / 8
