"""The logits beside a tiled loss: there for whoever reads them, in whatever way, and computed only then."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shared_specs import UnsupportedError
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.core.torch_counting import LiveBytes
from tests.models.test_torch_models import IDS, SCALES, Adapter, assert_same, build
from tiled_torch import tile_model
from tiled_torch.models.lazy import LazyTensor, Values


def not_made(logits: Any) -> bool:
    return isinstance(logits, LazyTensor) and logits.values_of.made is None


@pytest.fixture
def never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compute logits is an error."""

    def get(self: Values) -> Tensor:
        raise AssertionError("the logits were computed")

    monkeypatch.setattr(Values, "get", get)


READERS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda outputs: outputs.logits,
    "number": lambda outputs: outputs[1],
    "name": lambda outputs: outputs["logits"],
    "tuple": lambda outputs: outputs.to_tuple()[1],
    "slice": lambda outputs: outputs[:2][1],
    "unpacked": lambda outputs: (lambda loss, logits, *rest: logits)(*outputs.to_tuple()),
    "items": lambda outputs: dict(outputs.items())["logits"],
    "tree": lambda outputs: pytree.tree_flatten(outputs)[0][1],
    "pickle": lambda outputs: pickle.loads(pickle.dumps(outputs)).logits,
    "copy": lambda outputs: copy.deepcopy(outputs.logits),
    "numpy": lambda outputs: torch.from_numpy(outputs.logits.numpy()),
    "list": lambda outputs: torch.tensor(outputs.logits.tolist(), dtype=outputs.logits.dtype),
    "cast": lambda outputs: outputs.logits.to(torch.complex128).clone().real,
}


@pytest.mark.parametrize("reader", READERS)
def test_logits_beside_labels_are_there(reader: str) -> None:
    model = build("llama")
    with torch.no_grad():
        expected = model(input_ids=IDS, labels=IDS)
        found = tile_model(model, num_shards=3)(input_ids=IDS, labels=IDS)
        assert not_made(found.logits)
        assert list(found) == list(expected)
        assert len(found) == len(expected)
        read = READERS[reader](found)
    assert (read.shape, read.device) == (expected.logits.shape, expected.logits.device)
    assert relative_error(read.numpy(), expected.logits.numpy()) <= DISTRIBUTED_FLOAT64


def test_a_file_of_logits_holds_their_values() -> None:
    model, file = tile_model(build("llama")), io.BytesIO()
    with torch.no_grad():
        logits = model(input_ids=IDS, labels=IDS).logits
    torch.save(logits, file)
    file.seek(0)
    assert torch.equal(torch.load(file), logits)


def penalized(model: nn.Module, read_first: bool = False) -> tuple[Tensor, list[Tensor]]:
    """The loss and something of the logits, and the gradients of both together."""
    outputs = model(input_ids=IDS, labels=IDS)
    logits = outputs.logits
    loss = outputs.loss
    if not isinstance(logits, LazyTensor):  # transformers' own loss is in float32
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    total = logits.logsumexp(-1).square().mean() + loss
    if read_first:
        assert torch.is_tensor(logits.argmax(-1))
    trained = [p for p in model.parameters() if p.requires_grad]
    return total.detach(), list(torch.autograd.grad(total, trained))


@pytest.mark.parametrize("kind", [*SCALES, "llama", "qwen2"])
def test_gradients_through_logits_and_loss_together(kind: str) -> None:
    """Tied heads among them: the weight of one is also what the hidden states were made from."""
    model = build(kind, **SCALES.get(kind, {}), tie_word_embeddings=kind == "qwen2")
    total, gradients = penalized(model)
    found, ours = penalized(tile_model(model, num_shards=3), read_first=True)
    numbers = {str(n): g for n, g in enumerate(gradients)}
    assert_same((found, {str(n): g for n, g in enumerate(ours)}), (total, numbers))


def test_gradients_through_the_logits_of_an_adapted_head() -> None:
    model = build("llama")
    model.lm_head = Adapter(model.lm_head)
    total, gradients = penalized(model)
    tile_model(model, num_shards=3)
    with pytest.warns(UserWarning, match="lm_head is Adapter"):
        found, ours = penalized(model)
    for a, b in zip((found, *ours), (total, *gradients), strict=True):
        assert relative_error(a.numpy(), b.numpy()) <= limit(
            0.0, "float32"
        )  # the tiled loss casts logits, as transformers does


def test_a_head_with_dropout_has_one_mask_for_logits_and_gradients() -> None:
    model = build("llama")
    model.lm_head = nn.Sequential(nn.Dropout(0.5), model.lm_head)
    tile_model(model, num_shards=3)
    with pytest.warns(UserWarning, match="lm_head is Sequential"):
        outputs = model(input_ids=IDS, labels=IDS, output_hidden_states=True)
    before = torch.get_rng_state()
    logits, weight = outputs.logits, model.lm_head[1].weight
    values = logits.detach() + 0
    assert torch.equal(torch.get_rng_state(), before)  # nor do they take numbers from the program
    (gradient,) = torch.autograd.grad(logits, weight, values)
    # d(sum of squares / 2)/dW is logits^T rows, and rows are what these logits are made of: W gradient^T W gives both back
    rows = torch.linalg.lstsq(weight.detach(), values.flatten(0, 1).T).solution
    assert relative_error(gradient.numpy(), (values.flatten(0, 1).T @ rows.T).numpy()) <= DISTRIBUTED_FLOAT64


def test_reading_under_no_grad_leaves_the_graph() -> None:
    model = tile_model(build("llama"))
    logits = model(input_ids=IDS, labels=IDS).logits
    with torch.no_grad():
        assert not logits.argmax(-1).requires_grad
    assert logits.requires_grad
    with pytest.raises(RuntimeError, match=r"Can't call numpy\(\) on Tensor that requires grad"):
        logits.numpy()


def test_logits_that_are_read_too_late_are_refused() -> None:
    """After the optimizer's step they would be those of another model."""
    model = tile_model(build("llama"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    early, late = (model(input_ids=IDS, labels=IDS) for _ in range(2))
    before = early.logits.detach() * 1
    (early.loss + late.loss).backward()
    assert torch.equal(late.logits.detach() * 1, before)  # backward alone changes nothing
    late = model(input_ids=IDS, labels=IDS)
    optimizer.step()
    assert torch.equal(early.logits.detach(), before)  # read before
    with pytest.raises(
        RuntimeError, match=r"^outputs\.logits: the hidden states or the weights of lm_head were changed after"
    ):
        late.logits.sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(early.logits.sum(), model.lm_head.weight)


def test_other_memory_for_the_weight_is_seen() -> None:
    """As where a sharding engine takes it away."""
    model = tile_model(build("llama"))
    logits = model(input_ids=IDS, labels=IDS).logits
    model.lm_head.weight.data = torch.zeros_like(model.lm_head.weight)
    with pytest.raises(RuntimeError, match=r"^outputs\.logits: "):
        logits.sum()


def test_no_second_order_through_the_logits() -> None:
    model = tile_model(build("llama"))
    logits = model(input_ids=IDS, labels=IDS).logits
    with pytest.raises(UnsupportedError, match=r"^outputs\.logits: create_graph must be False in backward, got True\."):
        torch.autograd.grad(logits.sum(), model.lm_head.weight, create_graph=True)


def test_changed_in_place_like_any_other() -> None:
    model = tile_model(build("llama"))
    plain = model.eval()(input_ids=IDS).logits.detach()
    with torch.no_grad():
        logits = model(input_ids=IDS, labels=IDS).logits
        copied, shared = logits.clone(), logits.detach()
        assert logits.div_(2) is logits
        logits[..., 0] = 5.0
    halved = plain / 2
    halved[..., 0] = 5.0
    assert torch.equal(logits, halved)
    assert torch.equal(shared, halved)
    assert torch.equal(copied, plain)


class Counts(torch.autograd.Function):
    """An operation that autograd alone sees, as fused losses are."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits * 3

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy * 3


def test_a_custom_function_of_logits_passes_gradients_on() -> None:
    model = tile_model(build("llama"))
    plain = model.eval()(input_ids=IDS).logits
    (expected,) = torch.autograd.grad(3 * plain.sum(), model.lm_head.weight)
    logits = model(input_ids=IDS, labels=IDS).logits
    (found,) = torch.autograd.grad(Counts.apply(logits).sum(), model.lm_head.weight)
    assert relative_error(found.numpy(), expected.numpy()) <= DISTRIBUTED_FLOAT64


@pytest.mark.usefixtures("never_read")
def test_what_wrappers_do_to_outputs_computes_nothing() -> None:
    """Casts of mixed precision, hooks of FSDP, the sink of DDP, a backward past the logits."""
    model = tile_model(build("llama", vocab_size=4096), num_shards=8)
    ids = torch.arange(128).reshape(2, 64) % 31
    with LiveBytes() as live:
        outputs = model(input_ids=ids, labels=ids, use_cache=False)
        leaves, tree = pytree.tree_flatten(outputs)
        leaves = [leaf.clone() for leaf in leaves]
        leaves[1].register_hook(lambda grad: grad)
        again = pytree.tree_unflatten(leaves, tree)
        cast = type(again)({name: value.float().detach() for name, value in again.items()})
        assert cast.logits.shape == (2, 64, 4096)
        again.loss.backward()
    assert live.largest < 128 * 4096 * 8 / 2


def test_inside_autocast_logits_are_the_casts() -> None:
    """Also where they are read outside."""
    model = build("llama").float()
    with torch.no_grad():
        truth = model(input_ids=IDS).logits.numpy()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = model(input_ids=IDS).logits
            found = tile_model(model)(input_ids=IDS, labels=IDS).logits
        assert found.dtype == expected.dtype == torch.bfloat16
        wrong = relative_error(expected.float().numpy(), truth)
        assert relative_error(found.float().numpy(), truth) <= limit(wrong, "bfloat16")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_models_in_16_bits(dtype: torch.dtype) -> None:
    """The loss and the logits are at most as wrong as the untiled model's."""
    model = build("llama")
    with torch.no_grad():
        logits = model(input_ids=IDS).logits.numpy()
        loss = F.cross_entropy(torch.from_numpy(logits)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).numpy()
        plain = model.to(dtype)(input_ids=IDS, labels=IDS)
        found = tile_model(model, num_shards=3)(input_ids=IDS, labels=IDS)
    assert found.logits.dtype == plain.logits.dtype == dtype
    name = str(dtype).removeprefix("torch.")
    for ours, untiled, truth in ((found.loss, plain.loss, loss), (found.logits, plain.logits, logits)):
        wrong = relative_error(untiled.double().numpy(), truth)
        assert relative_error(ours.double().numpy(), truth) <= limit(wrong, name)


@pytest.mark.parametrize("keep", [3, torch.tensor([1, 4]), torch.tensor([[0, 8], [3, 2]]), IDS % 4 == 1], ids=range(4))
def test_logits_to_keep(keep: Any) -> None:
    """Beside labels too, where transformers knows only loss and logits of the same tokens."""
    model = build("gemma2", final_logit_softcapping=0.5).eval()
    expected, whole = model(input_ids=IDS, logits_to_keep=keep).logits, model(input_ids=IDS).logits
    tile_model(model, num_shards=4)
    loss = model(input_ids=IDS, labels=IDS).loss
    found = model(input_ids=IDS, labels=IDS, logits_to_keep=keep)
    assert torch.equal(found.loss, loss)
    assert found.logits.shape == expected.shape != whole.shape
    assert relative_error(found.logits.detach().numpy(), expected.detach().numpy()) <= DISTRIBUTED_FLOAT64


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch's own tracer
def test_logits_of_a_compiled_model() -> None:
    """There too, without a compilation for every step of the optimizer, and refused after it."""
    model = build("llama").float()
    with torch.no_grad():
        expected = model(input_ids=IDS, labels=IDS)
    compiled = torch.compile(tile_model(model, num_shards=3), backend="aot_eager", fullgraph=True)
    for step in range(3):
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            outputs = compiled(input_ids=IDS, labels=IDS)
        if step == 0:
            assert list(outputs) == list(expected)
            assert not_made(outputs[1])
            assert relative_error(outputs[1].detach().numpy(), expected[1].numpy()) <= limit(0.0, "float32")
            known = pickle.loads(pickle.dumps(outputs))
            assert type(known) is type(expected)
            continue
        outputs.loss.backward()
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        with pytest.raises(RuntimeError, match=r"^outputs\.logits: "):
            outputs.logits.sum()


# What the compiler does with tensors that it takes up after a break in the graph.
@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch's own tracer
def test_outputs_that_come_from_one_graph_into_another() -> None:
    """Their length is what a compiler guards on: it is the same before and after the logits are made."""
    model = tile_model(build("llama").float(), num_shards=3)
    expected = model(input_ids=IDS, labels=IDS)

    @torch.compile(backend="eager")
    def step() -> Any:
        outputs = model(input_ids=IDS, labels=IDS)
        torch._dynamo.graph_break()
        return outputs, outputs.loss * 2

    for again in range(2):
        with torch._dynamo.config.patch(error_on_recompile=again > 0):
            outputs, twice = step()
        assert len(outputs) == len(expected)
        assert list(outputs) == list(expected)
        assert torch.equal(twice, 2 * expected.loss)
        for logits in (outputs.get("logits"), outputs["logits"], outputs[1], outputs.logits):
            assert relative_error(logits.detach().numpy(), expected.logits.detach().numpy()) <= limit(0.0, "float32")
