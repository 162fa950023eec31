"""What users do to a model in PyTorch gives with a tiled model what it gives with the untiled one, put through the same habit.

A habit is a few lines: it gets a fresh model, does something to it and returns what is compared: losses, gradients, parameters,
logits, keys. The same function runs the untiled model with the same weights, and what it returns is the reference. Where the
untiled model raises, the tiled one has to as well; what a tiled model is documented to refuse has the words of its refusal.
The models are a Llama of transformers ("mlp" and "block" are scopes of `tile_model`) and a small module with `TiledMLP` and
`TiledLinearCrossEntropy` ("module").
"""

import copy
import importlib.util
from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from shared_specs.errors import UnsupportedError
from shared_specs.tolerances import between
from tests.asserting import assert_within
from tiled_torch import TiledLinearCrossEntropy, TiledMLP, tile_model

transformers = pytest.importorskip("transformers")

Habit = Callable[[Any], Any]
VOCAB, H, I, SHARDS = 40, 16, 24, 4  # noqa: E741
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": I,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
RANDOM = torch.Generator().manual_seed(0)
IDS, OTHER_IDS = (torch.randint(3, VOCAB, (2, 9), generator=RANDOM) for _ in range(2))
X = torch.randn(2, 9, H, generator=RANDOM)
LABELS = IDS.clone()
LABELS[0, 3] = -100
HAS_PEFT = importlib.util.find_spec("peft") is not None


# The models.


@cache
def prototype(attention: str) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, attn_implementation=attention)
    return noisy(transformers.LlamaForCausalLM(config))


def noisy(model: Any) -> Any:
    """The model, with something added to every parameter: zeros and ones hide mistakes."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return model


def llama(form: str, attention: str = "sdpa") -> Any:
    model = copy.deepcopy(prototype(attention))
    return model if form == "plain" else tile_model(model, scope=form, num_shards=SHARDS)  # type: ignore[arg-type]


class PlainMLP(nn.Module):
    """The parameters of `TiledMLP`, and three products."""

    def __init__(self) -> None:
        super().__init__()
        for name, (outputs, inputs) in {"gate": (I, H), "up": (I, H), "down": (H, I)}.items():
            self.register_parameter(f"w_{name}", nn.Parameter(torch.zeros(outputs, inputs)))
            self.register_parameter(f"b_{name}", nn.Parameter(torch.zeros(outputs)))

    def forward(self, x: Tensor) -> Tensor:
        own = dict(self.named_parameters())
        gate, up = (F.linear(x, own[f"w_{name}"], own[f"b_{name}"]) for name in ("gate", "up"))
        return F.linear(F.silu(gate) * up, own["w_down"], own["b_down"])


class PlainHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(VOCAB, H)), nn.Parameter(torch.zeros(VOCAB))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, self.weight, self.bias).flatten(0, -2), targets.flatten())


class Net(nn.Module):
    """loss(x + mlp(norm(x))), the smallest module with all that is tiled."""

    def __init__(self, form: str) -> None:
        super().__init__()
        plain = form == "plain"
        self.norm: nn.Module = nn.LayerNorm(H)
        self.mlp: Any = PlainMLP() if plain else TiledMLP(H, I, bias=True, num_shards=SHARDS)
        self.lm_head: Any = PlainHead() if plain else TiledLinearCrossEntropy(H, VOCAB, bias=True, num_shards=SHARDS)

    def forward(self, x: Tensor, targets: Tensor = LABELS) -> Tensor:
        return self.lm_head(x + self.mlp(self.norm(x)), targets)


def module(form: str) -> Any:
    model = Net(form)
    torch.manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    return model


MODELS: dict[str, Callable[[str], Any]] = {"mlp": llama, "block": llama, "module": module}


# How habits are put down and compared.

HABITS: dict[str, list[Any]] = {}  # of each file


def habit(
    *forms: str,
    deep: bool = False,
    refused: str = "",
    raises: bool = False,
    faults: dict[str, str] | None = None,
    peft: bool = False,
) -> Callable[[Habit], Habit]:
    """Put a function on the list once for each form, of which all but the first are deep.

    deep: the first is too. refused: what a tiled model says where it is documented not to do this. raises: the untiled model
    raises. faults: what is wrong with a form today. peft: whether the package is needed.
    """

    def put_down(do: Habit) -> Habit:
        for form in forms:
            marks = [] if form == forms[0] and not deep else [pytest.mark.deep]
            if faults and form in faults:
                raised = (AssertionError, CheckpointError)
                marks.append(pytest.mark.xfail(strict=True, reason=faults[form], raises=raised))
            if peft:
                marks.append(
                    pytest.mark.skipif(not HAS_PEFT, reason="peft is not installed (requirements/trainers.txt)")
                )
            entry = pytest.param(do, form, refused, raises, id=f"{do.__name__}-{form}", marks=marks)
            HABITS.setdefault(do.__module__, []).append(entry)
        return do

    return put_down


@cache
def reference(do: Habit, kind: Callable[[str], Any]) -> Any:
    return outcome(do, kind("plain"))


def outcome(do: Habit, model: Any) -> Any:
    """What a habit returns, as tensors and values by their path, or the error that it raised."""
    torch.manual_seed(11)
    try:
        return dict(flat("", do(model)))
    except Exception as error:
        return error


def flat(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from flat(f"{name}.{index}", inner)
    else:
        yield name, value.detach().clone() if isinstance(value, Tensor) else value


def every_habit(module: str) -> Callable[[Any], Any]:
    """Mark a test as that of every habit that is put down in a file."""
    marks = (
        pytest.mark.filterwarnings("ignore:tile_model. the loss of LlamaForCausalLM does not run through:UserWarning"),
        pytest.mark.filterwarnings("ignore:tile_model. .*(runs through tile|in spite of scope=.block.):UserWarning"),
        # Of transformers, in peft too.
        pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed in v6:FutureWarning"),
        pytest.mark.parametrize(("do", "form", "refused", "raises"), HABITS[module]),
    )
    return lambda test: reduce(lambda marked, mark: mark(marked), marks, test)


def check_habit(do: Habit, form: str, refused: str, raises: bool) -> None:
    """Fail where a tiled model gives something else than the untiled one."""
    expected, found = reference(do, MODELS[form]), outcome(do, MODELS[form](form))
    if refused:
        assert not isinstance(expected, Exception), expected
        with pytest.raises((UnsupportedError, RuntimeError), match=refused):
            raise found if isinstance(found, Exception) else AssertionError("it is not refused")
        return
    if raises:
        assert isinstance(expected, Exception), "the untiled model raised nothing"
        assert isinstance(found, Exception), f"the untiled model raised {expected!r}"
        return
    for each in (expected, found):
        if isinstance(each, Exception):
            raise each
    assert found.keys() == expected.keys()
    assert any(isinstance(a, Tensor) and a.count_nonzero() for a in expected.values()), "nothing is compared"
    for name, a in expected.items():
        assert_same(found[name], a, name)


def assert_same(found: Any, expected: Any, name: str) -> None:
    if not isinstance(expected, Tensor):
        assert found == expected, name
        return
    assert found.dtype == expected.dtype, name
    if "gradient" in name:
        assert expected.count_nonzero(), f"{name} is zero"
    if expected.is_floating_point():
        allowed = between(str(expected.dtype).removeprefix("torch."))
        assert_within(found.double().numpy(), expected.double().numpy(), allowed, name)
    else:
        np.testing.assert_array_equal(found.numpy(), expected.numpy(), name)


# What habits have in common.


def forward_of(model: Any, ids: Tensor = IDS, **more: Any) -> Tensor:
    """The loss of any of the models."""
    if isinstance(model, Net):
        return model(X.to(next(model.parameters()).dtype), ids)
    return model(input_ids=ids, labels=more.pop("labels", ids), **more).loss


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def of_step(model: Any, ids: Tensor = IDS, **more: Any) -> dict[str, Any]:
    """The loss and all gradients of a step."""
    model.zero_grad()
    loss = forward_of(model, ids, **more)
    loss.backward()
    return {"loss": loss.detach(), "gradients": gradients_of(model)}


def trained(model: Any, optimizer: Any, between_steps: Callable[[], Any] = lambda: None) -> dict[str, Any]:
    """The losses and parameters of two steps, some of which have moved."""
    before, losses = {name: p.detach().clone() for name, p in model.named_parameters()}, []
    for ids in (IDS, OTHER_IDS):
        optimizer.zero_grad()
        loss = forward_of(model, ids)
        loss.backward()
        between_steps()
        optimizer.step()
        losses.append(loss)
    after = dict(model.named_parameters())
    moved = {name: not torch.equal(p, before[name]) for name, p in after.items()}
    assert any(moved.values())
    return {"losses": losses, "parameters": after, "moved": moved}
