"""Checkpointing in one process: gradients, bytes that are held and at the peak, hooks, errors."""

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shared_specs import SpecError, UnsupportedError
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tiled_torch import tile
from tiled_torch.core import replay
from tiled_torch.parallel import CheckpointWithoutOutput, checkpoint, seed_parallel

TOKENS, HIDDEN, WIDE = 16, 8, 64


class HeldBytes(TorchDispatchMode):
    """Bytes of the storages made under the mode that are still there, at the size they have now; and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self._storages.add(tensor.untyped_storage())
        self.peak = max(self.peak, self.held())
        return out

    def held(self) -> int:
        return sum(storage.nbytes() for storage in self._storages)


class Net(nn.Module):
    """up, an activation with dropout in a stream and out of one, down; three times. `form` says what is kept."""

    def __init__(self, form: str, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.states = form, seed_parallel(5)
        self.ups = nn.ModuleList(nn.Linear(HIDDEN, WIDE, dtype=dtype) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(WIDE, HIDDEN, dtype=dtype) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDE, dtype=dtype) for _ in range(3))

    def activation(self, norm: nn.Module, x: Tensor) -> Tensor:
        with self.states.fork():
            x = nn.functional.dropout(x, 0.2)
        return nn.functional.dropout(nn.functional.gelu(norm(x)), 0.2)

    def layer(self, i: int, x: Tensor) -> Tensor:
        h = self.ups[i](x)
        if self.form == "output":
            call = CheckpointWithoutOutput()
            h = call.checkpoint(self.activation, self.norms[i], h)
            y = self.downs[i](h)
            call.discard_output_and_register_recompute(y)
            return y
        return self.downs[i](self.activation(self.norms[i], h))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(3):
            x = checkpoint(self.layer, i, x) if self.form == "checkpoint" else self.layer(i, x)
        return x


def batch(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=dtype).requires_grad_()


def gradients(form: str, autocast: bool = False, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[str]]:
    model, x = Net(form, dtype), batch(dtype)
    fired: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    torch.manual_seed(2)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = model(x).float().square().sum() if autocast else model(x).square().sum()
    torch.rand(3)  # numbers that recomputation must not miss
    with model.states.fork():
        torch.rand(3)
    loss.backward()
    grads = [x.grad, *(p.grad for p in model.parameters())]
    assert all(grad is not None for grad in grads)
    assert sorted(fired) == sorted(name for name, _ in model.named_parameters())
    return grads, fired  # type: ignore[return-value]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("form", ["checkpoint", "output"])
def test_gradients_to_the_last_bit(form, autocast):
    dtype = torch.float32 if autocast else torch.float64
    expected, _ = gradients("plain", autocast, dtype)
    found, _ = gradients(form, autocast, dtype)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_bytes():
    """Held between forward and backward, in units of [T, WIDE] float64, with the [T, HIDDEN] ones counted exactly."""
    held, peak = {}, {}
    for form in ("plain", "checkpoint", "output"):
        model, x = Net(form), batch()
        model(x)  # what is made once
        with HeldBytes() as meter:
            y = model(x)
            held[form] = meter.held()
            y.sum().backward()
            peak[form] = meter.peak
            grads = sum(p.numel() * 8 for p in (x, *model.parameters()))
        del y
        assert meter.held() == grads, "something outlives backward"
    wide, narrow = 8 * TOKENS * WIDE, 8 * TOKENS * HIDDEN
    assert held["checkpoint"] <= 3 * narrow + 3 * 5056 + 3 * 4096  # inputs, y, states of the random generators
    # Of every layer: the wide input of the activation and y. The generators' states are a few KiB.
    assert held["output"] <= 3 * (wide + narrow) + 3 * 2 * 5056 + 4096
    assert held["plain"] >= 3 * (4 * wide + narrow)
    assert peak["output"] < peak["plain"]
    assert peak["checkpoint"] < peak["plain"]


def test_an_output_that_is_discarded_takes_no_bytes():
    x = batch()
    call = CheckpointWithoutOutput()
    h = call.checkpoint(lambda x: x.exp().repeat(1, 8), x)
    expected = h.detach().clone()
    y = h @ torch.ones(WIDE, 2, dtype=torch.float64)
    call.discard_output_and_register_recompute(y)
    assert h.untyped_storage().nbytes() == 0
    seen = []
    y.register_hook(lambda _: seen.append(h.detach().clone()))
    y.sum().backward()
    assert torch.equal(seen[0], expected)


def test_structures_and_two_backwards():
    x, weight = batch(), torch.randn(HIDDEN, 2, dtype=torch.float64, requires_grad=True)
    runs = 0

    def pair(x: Tensor) -> dict[str, Tensor]:
        nonlocal runs
        runs += 1
        return {"a": x.sin(), "b": x.exp() * 2}

    call = CheckpointWithoutOutput()
    results = call.checkpoint(pair, x)
    y = results["a"] @ weight + results["b"] @ weight
    call.discard_output_and_register_recompute(y)
    assert {r.untyped_storage().nbytes() for r in results.values()} == {0}
    loss = y.square().sum()
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    assert runs == 2, "one computation fills the outputs and serves fn's own backward"
    second = torch.autograd.grad(loss, (x, weight))
    y = x.sin() @ weight + x.exp() * 2 @ weight
    expected = torch.autograd.grad(y.square().sum(), (x, weight))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, second, expected, strict=True))


def test_without_gradients():
    """Nothing will be computed again: the output is freed for good."""
    call = CheckpointWithoutOutput()
    with torch.no_grad():
        h = call.checkpoint(torch.sin, batch())
        y = h * 2
        call.discard_output_and_register_recompute(y)
    assert h.untyped_storage().nbytes() == 0


def test_inside_a_checkpointed_region():
    """CheckpointWithoutOutput within checkpoint(): recomputation goes through both."""
    plain, model = Net("plain"), Net("output")
    x, again = batch(), batch()
    states, default = plain.states.states(), torch.get_rng_state()
    plain(x).square().sum().backward()
    model.states.set_states(states)
    torch.set_rng_state(default)
    checkpoint(model, again).square().sum().backward()
    assert torch.equal(x.grad, again.grad)  # type: ignore[arg-type]
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def test_inside_a_checkpointed_region_nothing_is_held():
    """Between forward and backward as many bytes as without it: the region keeps its inputs."""
    held = {}
    for form in ("plain", "output"):
        model, x = Net(form), batch()
        with HeldBytes() as meter:
            y = checkpoint(model, x)
            held[form] = meter.held()
        del y
    assert held["output"] == held["plain"]


def test_calls_nest():
    """A call inside another is computed again with it, once."""
    x, runs = batch(), []

    def inner(x: Tensor) -> Tensor:
        runs.append(1)
        return x.exp()

    def outer(x: Tensor) -> Tensor:
        call = CheckpointWithoutOutput()
        h = call.checkpoint(inner, x)
        y = h.sin()
        call.discard_output_and_register_recompute(y)
        return y * 2

    call = CheckpointWithoutOutput()
    h = call.checkpoint(outer, x)
    y = h.cos()
    call.discard_output_and_register_recompute(y)
    assert h.untyped_storage().nbytes() == 0
    (found,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad((x.exp().sin() * 2).cos().sum(), x)
    assert torch.equal(found, expected)
    assert len(runs) == 2


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("form", ["checkpoint", "output"])
def test_inside_compiled_code(form):
    """Each call as it is, between compiled graphs: activations that AOT autograd keeps are not those of the replay."""
    found = []
    torch.compiler.reset()
    for compiled in (False, True):
        model, x = Net("output" if form == "output" else "plain"), batch()
        fn = model if form == "output" else partial(checkpoint, model)
        run = lambda x, fn=fn: 2 * fn(x + 1)  # noqa: E731
        (torch.compile(run, backend="aot_eager") if compiled else run)(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(relative_error(a.numpy(), b.numpy()) <= DISTRIBUTED_FLOAT64 for a, b in zip(*found, strict=True))


def test_inside_a_tiled_region():
    model, x, again = Net("output"), batch(), batch()
    plain = Net("plain")
    for net in (model, plain):
        net.activation = lambda norm, x: nn.functional.gelu(norm(x))  # type: ignore[method-assign]
    tile(model, num_shards=3)(x).square().sum().backward()
    plain(again).square().sum().backward()
    assert x.grad is not None
    assert again.grad is not None
    assert relative_error(x.grad.numpy(), again.grad.numpy()) <= DISTRIBUTED_FLOAT64


def offloaded(hooks: Any) -> None:
    with hooks:
        CheckpointWithoutOutput().checkpoint(torch.sin, batch())


def discard(output: Any, hook: Any) -> None:
    call = CheckpointWithoutOutput()
    if output is not None:
        call.checkpoint(output, batch())
    call.discard_output_and_register_recompute(hook)


def twice() -> None:
    call = CheckpointWithoutOutput()
    call.checkpoint(torch.sin, batch())
    call.checkpoint(torch.sin, batch())


_DISCARD = "CheckpointWithoutOutput.discard_output_and_register_recompute"
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "fn": (lambda: checkpoint(3), TypeError, "checkpoint: fn must be a module or a function, got int."),  # type: ignore[arg-type]
    "group without use": (
        lambda: checkpoint(torch.sin, batch(), group=object()),
        SpecError,
        "checkpoint: group must be left out unless partition_inputs is True, got object.",
    ),
    "no process group": (
        lambda: checkpoint(torch.sin, batch(), partition_inputs=True),
        UnsupportedError,
        "checkpoint: group must be usable here, got no initialised process group. "
        "Call torch.distributed.init_process_group first.",
    ),
    "call of nothing": (
        lambda: CheckpointWithoutOutput().checkpoint(None),  # type: ignore[arg-type]
        TypeError,
        "CheckpointWithoutOutput.checkpoint: fn must be a module or a function, got NoneType.",
    ),
    "second call": (
        twice,
        SpecError,
        "CheckpointWithoutOutput.checkpoint: this object has been used for a call before. Make a new one for every call.",
    ),
    "view": (
        lambda: CheckpointWithoutOutput().checkpoint(lambda x: x.view(-1), batch()),
        SpecError,
        "CheckpointWithoutOutput.checkpoint: the output shares the memory of an argument. Return a copy of it.",
    ),
    "offloading": (
        lambda: offloaded(torch.autograd.graph.save_on_cpu()),
        SpecError,
        "CheckpointWithoutOutput.checkpoint: this call is inside hooks on saved tensors of "
        "torch.autograd.graph. What they take elsewhere need not be discarded: call fn itself there.",
    ),
    "hooks of one's own": (
        lambda: offloaded(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)),
        SpecError,
        "CheckpointWithoutOutput.checkpoint: this call is inside hooks on saved tensors of "
        f"{__name__}. What they take elsewhere need not be discarded: call fn itself there.",
    ),
    "no call": (
        lambda: discard(None, batch()),
        SpecError,
        f"{_DISCARD}: there is no output to discard. Call checkpoint first.",
    ),
    "hook kind": (
        lambda: discard(torch.sin, 3),
        TypeError,
        f"{_DISCARD}: hook_tensor must be an array, got int.",
    ),
    "hook without gradient": (
        lambda: discard(torch.sin, torch.ones(3)),
        SpecError,
        f"{_DISCARD}: hook_tensor needs no gradient, while the output does. "
        "Compute it from the output, with gradients enabled.",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    call, error, message = REFUSED[what]
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert str(caught.value) == message


def test_recomputation_that_differs_is_an_error():
    """Arguments written to, another number of saved tensors, another shape."""
    x = batch()
    given = x * 1.0
    call = CheckpointWithoutOutput()
    y = call.checkpoint(torch.sin, given) * 2
    call.discard_output_and_register_recompute(y)
    given.data.zero_()
    with torch.no_grad():
        given.add_(1)
    with pytest.raises(RuntimeError, match="an argument must be left as it was, got one that was written to"):
        y.sum().backward()
    calls = [0]

    def other(x: Tensor) -> Tensor:
        calls[0] += 1
        return x.sin() if calls[0] == 1 else x.sin().exp()

    call = CheckpointWithoutOutput()
    y = call.checkpoint(other, x).exp()
    call.discard_output_and_register_recompute(y)
    with pytest.raises(RuntimeError, match="what fn saves must be as before, 1 tensors, got 2 tensors"):
        y.sum().backward()


@pytest.mark.parametrize("function", ["checkpoint", "recomputation"])
def test_a_cuda_graph_that_captures_a_recomputation_is_refused(function, monkeypatch):
    """A pretended capture: the generators' states, which `tile` and CheckpointWithoutOutput read too, cannot be read in one."""
    calls = {
        "checkpoint": lambda: checkpoint(torch.sin, torch.ones(4, 2, requires_grad=True)),
        "recomputation": lambda: replay.random_state(torch.device("cuda")),
    }
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    message = rf"^{function}: this call is inside the capture of a CUDA graph\. It reads the states"
    with pytest.raises(UnsupportedError, match=message):
        calls[function]()
