"""`tiled_model_loss`: the loss of a model's logits is that of the untiled ones, with every gradient, and no logits are made."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_specs.config import LossOptions
from shared_specs.errors import SpecError, UnsupportedError
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, FLOOR, MODEL_FLOAT32
from tests.asserting import assert_within
from tests.core.torch_counting import LiveBytes
from tests.models.supported import IDS, build
from tests.ranks import Ranks

pytest.importorskip("transformers")

from tiled_torch import tile_model, tiled_model_loss, tiling_paths

H, V = 8, 16


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


TOKENS = torch.randint(V, (4, 7), generator=torch.Generator().manual_seed(0))
INPUTS, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:].clone()
TARGETS[0, 2] = -100


class Model(nn.Module):
    """An embedding, an MLP, and a head of some form."""

    def __init__(self, form: Any, *, bias: bool = False, rate: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.form = form
        self.embedding = nn.Embedding(V, H)
        self.mlp = nn.Sequential(nn.Linear(H, 12), nn.GELU(), nn.Linear(12, H))
        self.drop = nn.Dropout(rate)
        self.head = nn.Linear(H, V, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        return self.form(self, self.drop(self.mlp(self.embedding(tokens))))


HEADS = {
    "layer": lambda model, x: model.head(x),
    "flat": lambda model, x: model.head(x.flatten(0, 1)).view(*x.shape[:-1], V),
    "cast": lambda model, x: model.head(x).float(),
    "scaled": lambda model, x: 0.5 * model.head(x) / 3.0,
    "capped": lambda model, x: 5.0 * torch.tanh(model.head(x) / 5.0),
    "scaled and capped": lambda model, x: torch.tanh(model.head(x) * 3.0) * 2.0,
    "frozen bias": lambda model, x: model.head(x) + torch.arange(V, dtype=x.dtype),
}


def both(form: Any, **options: Any) -> tuple[Any, Any]:
    """Loss and gradients of a step without the logits and with them."""
    model = Model(form, **options).double()
    untiled, steps = copy.deepcopy(model), []
    for each in (model, untiled):
        torch.manual_seed(2)
        if each is model:
            loss = tiled_model_loss(model, TARGETS, INPUTS, num_shards=5)
        else:
            loss = F.cross_entropy(untiled(INPUTS).flatten(0, 1), TARGETS.flatten())
        loss.backward()
        steps.append((loss.detach(), *(p.grad for p in each.parameters())))
    assert type(model.head) is nn.Linear
    assert not model._forward_hooks
    return steps[0], steps[1]


@pytest.mark.parametrize(
    ("head", "options"),
    [
        *((head, {}) for head in HEADS),
        ("layer", {"tied": True}),
        ("capped", {"bias": True}),
        ("layer", {"rate": 0.3}),
    ],
    ids=str,
)
def test_it_is_the_loss_of_the_logits(head: str, options: dict[str, Any]) -> None:
    for found, expected in zip(*both(HEADS[head], **options), strict=True):
        limit = MODEL_FLOAT32 if head == "cast" else FLOOR["float64"]
        assert_within(found.numpy(), expected.numpy(), limit, "loss and gradients")


def test_aux_and_options_of_the_loss() -> None:
    model = Model(lambda model, x: (model.head(x), {"norm": x.sum()}))
    options = LossOptions(reduction="none", outputs=("lse",))
    weight = torch.linspace(0, 1, TARGETS.numel()).view(TARGETS.shape)
    result, aux = tiled_model_loss(model, TARGETS, INPUTS, loss=options, token_weight=weight, has_aux=True)
    logits, expected = model(INPUTS)
    losses = weight * F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), reduction="none").view(TARGETS.shape)
    for found, theirs in ((result.loss, losses), (result.lse, logits.logsumexp(-1)), (aux["norm"], expected["norm"])):
        assert_within(found.detach().numpy(), theirs.detach().numpy(), MODEL_FLOAT32, "results")


def test_a_head_with_an_adapter_is_called_for_every_shard() -> None:
    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x.sum(-1, keepdim=True) * torch.linspace(0, 1, V, dtype=x.dtype)

    model = Model(HEADS["capped"]).double()
    model.head = Adapted(H, V, dtype=torch.float64)
    found = tiled_model_loss(model, TARGETS, INPUTS, num_shards=5)
    expected = F.cross_entropy(model(INPUTS).flatten(0, 1), TARGETS.flatten())
    assert_within(found.detach().numpy(), expected.detach().numpy(), DISTRIBUTED_FLOAT64, "loss")
    with pytest.raises(
        UnsupportedError, match=r"^tiled_model_loss: the options of the loss must be those of torch\.nn"
    ):
        tiled_model_loss(model, TARGETS, INPUTS, loss=LossOptions(z_loss=0.1))


class Cooled(nn.Module):
    """Holds a model as replicas do, and divides its logits."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor) -> Tensor:
        return self.module(tokens) / 4.0


def test_what_a_module_around_the_model_does_to_its_logits() -> None:
    model = Cooled(Model(HEADS["layer"])).double()
    found = tiled_model_loss(model, TARGETS, INPUTS, num_shards=5)
    expected = F.cross_entropy(model(INPUTS).flatten(0, 1), TARGETS.flatten())
    assert_within(found.detach().numpy(), expected.detach().numpy(), FLOOR["float64"], "loss")


def test_beside_tiled_mlps_and_under_replicas() -> None:
    """A model of `tile_model`, inside a module that hands its result on."""
    model, untiled = (Model(HEADS["layer"]) for _ in range(2))
    tile_model(model, num_shards=3)
    found = tiled_model_loss(nn.DataParallel(model), TARGETS, INPUTS)
    assert tiling_paths(model) == {"mlp": "tiled_mlp"}
    expected = F.cross_entropy(untiled(INPUTS).flatten(0, 1), TARGETS.flatten())
    assert_within(found.detach().numpy(), expected.detach().numpy(), MODEL_FLOAT32, "loss")


class Around(nn.Module):
    """Returns what the model in it returns as `logits`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits


def test_a_model_of_transformers_in_a_module() -> None:
    model = Around(build("llama"))
    found = tiled_model_loss(model, IDS[:, 1:], IDS[:, :-1], num_shards=5)
    expected = F.cross_entropy(model(IDS[:, :-1]).flatten(0, 1), IDS[:, 1:].flatten())
    assert_within(found.detach().numpy(), expected.detach().numpy(), FLOOR["float64"], "loss")
    with pytest.raises(
        TypeError, match=r"got CausalLMOutputWithPast\. tile_model computes the loss of a model of transformers"
    ):
        tiled_model_loss(model.model, IDS[:, 1:], IDS[:, :-1])


@pytest.mark.deep
def test_a_compiled_step_runs_it_uncompiled() -> None:
    model = Model(HEADS["capped"])
    found = torch.compile(lambda: tiled_model_loss(model, TARGETS, INPUTS, num_shards=5), backend="eager")()
    expected = F.cross_entropy(model(INPUTS).flatten(0, 1), TARGETS.flatten())
    assert_within(found.detach().numpy(), expected.detach().numpy(), MODEL_FLOAT32, "loss")
    compiled: Any = torch.compile(model, backend="eager")
    with pytest.raises(UnsupportedError, match=r"^tiled_model_loss: model is compiled\. Compile its layers instead\."):
        tiled_model_loss(compiled, TARGETS, INPUTS)


def test_logits_are_never_made() -> None:
    """Counted: what is live at once is far below one array of logits."""
    tokens, vocab = 1024, 2048
    model = nn.Sequential(nn.Embedding(vocab, H), nn.Linear(H, vocab))
    ids = torch.arange(tokens) % vocab
    with LiveBytes() as live:
        tiled_model_loss(model, ids, ids, num_shards=64).backward()
    assert live.peak < tokens * vocab * 4 / 4


@pytest.mark.ranks
@pytest.mark.deep_but(1)
@pytest.mark.parametrize("engine", ["fsdp", "ddp"])
def test_over_ranks(two: Ranks, engine: str) -> None:
    """Each rank's own tokens; gradients are averaged. The loss is computed where the engine has gathered the head."""
    for error in two.run("tests.models.ranks_torch_units:model_loss", engine=engine):
        assert error <= DISTRIBUTED_FLOAT64


REFUSED = {
    "log_softmax": (lambda model, x: model.head(x).log_softmax(-1), "logits to which log_softmax is applied"),
    "another layer": (lambda model, x: x @ model.embedding.weight.T, "logits that head does not make"),
    "a mask": (lambda model, x: torch.where(x[..., :1] > 0, model.head(x), 0.0), "logits to which where is applied"),
    "a learned factor": (lambda model, x: model.head(x) * model.mlp[0].bias[0], "logits to which mul is applied"),
    "tanh twice": (lambda model, x: model.head(x).tanh().tanh(), "logits after more than a factor and a softcap"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_other_logits_are_refused(form: str) -> None:
    head, reason = REFUSED[form]
    model = Model(head)
    with pytest.raises(
        UnsupportedError, match=rf"^tiled_model_loss: model must be one whose logits .*, got .*{reason}"
    ):
        tiled_model_loss(model, TARGETS, INPUTS)
    assert type(model.head) is nn.Linear
    assert not model._forward_hooks


def test_bad_arguments_are_refused() -> None:
    model = Model(HEADS["layer"])
    with pytest.raises(SpecError, match=r"^tiled_model_loss: targets must be of the shape of the logits \[4, 6, 16\]"):
        tiled_model_loss(model, TARGETS[:, 1:], INPUTS)
    with pytest.raises(TypeError, match=r"^tiled_model_loss: model must be a torch.nn.Module, got dict"):
        tiled_model_loss({}, TARGETS, INPUTS)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^tiled_model_loss: model must be a function that returns logits, got tuple"):
        tiled_model_loss(Model(lambda model, x: (model.head(x), None)), TARGETS, INPUTS)
    with pytest.raises(TypeError, match=r"^tiled_model_loss: model must be a function that returns \(logits, aux\)"):
        tiled_model_loss(model, TARGETS, INPUTS, has_aux=True)
    with pytest.raises(UnsupportedError, match=r"^tiled_model_loss: loss.logit_softcap must be None, got 3.0"):
        tiled_model_loss(model, TARGETS, INPUTS, loss=LossOptions(logit_softcap=3.0))
    with pytest.raises(TypeError, match=r"^tiled_model_loss: loss must be a LossOptions, got dict"):
        tiled_model_loss(model, TARGETS, INPUTS, loss={"reduction": "sum"})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^tiled_model_loss: has_aux must be True or False, got int"):
        tiled_model_loss(model, TARGETS, INPUTS, has_aux=1)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"^tiled_model_loss: model must be one with a head, got Embedding"):
        tiled_model_loss(model.embedding, TARGETS, INPUTS)
