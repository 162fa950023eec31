"""A JAX function as a PyTorch operation: JAX's results to the bit, PyTorch's rules for everything around them."""

import gc
import weakref
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiled_jax
import tiled_torch
from shared_specs.errors import SpecError, UnsupportedError
from shared_specs.mlp.cases import MLP_CASES, MLPCase, make_inputs
from shared_specs.tolerances import DEMO_LOSS_RTOL
from tests.adapters import ADAPTERS
from tests.asserting import assert_near, assert_within, truth
from tiled_torch.bridge import jax_function, to_jax, to_torch


def tanh_product(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def draw(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.fixture
def product() -> Any:
    return jax_function(tanh_product)


WITH_BIASES = next(case for case in MLP_CASES if case.biases and not case.fused and case.dtype == "bfloat16")
PICKED = [MLP_CASES[1], MLP_CASES[2], WITH_BIASES, next(case for case in MLP_CASES if case.dims == (0,))]


def run_in_torch(case: MLPCase, function: Any, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """y and every gradient of one call with weights [out, in]; `function` takes them in its own layout."""
    leaves = {name: array.clone().requires_grad_() for name, array in arrays.items() if name != "dy"}
    biases = {name: leaves[f"b_{name}"] for name in case.biases}
    y = function(leaves["x"], leaves["w_gate"], leaves["w_up"], leaves["w_down"], biases)
    y.backward(arrays["dy"])
    return {"y": y.detach()} | {f"d{name}": leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("case", PICKED, ids=lambda case: case.id)
def test_the_jax_mlp_inside_pytorch_agrees_with_the_pytorch_mlp(case: MLPCase) -> None:
    mlp = partial(tiled_jax.tiled_mlp, num_shards=case.num_shards)
    inside = jax_function(lambda x, g, u, d, biases: mlp(x, g, u, d, biases=biases))
    arrays = {
        name: ADAPTERS["torch"].from_numpy(array.T.copy() if name.startswith("w") else array)
        for name, array in make_inputs(case).items()
    }
    of_jax = run_in_torch(case, lambda x, g, u, d, b: inside(x, g.T, u.T, d.T, b), arrays)
    of_torch = run_in_torch(
        case, lambda x, g, u, d, b: tiled_torch.tiled_mlp(x, g, u, d, biases=b, num_shards=case.num_shards), arrays
    )
    oracle, limits = truth(case)
    assert of_jax.keys() == of_torch.keys() == oracle.keys()
    for name, expected in oracle.items():
        assert of_jax[name].dtype == of_torch[name].dtype
        difference = (of_jax[name].double() - of_torch[name].double()).numpy()
        expected = expected.T if name.startswith("dw") else expected
        assert_within(expected + difference, expected, 2 * limits[name], f"{case.id} {name}")


class Inside(nn.Module):
    """A model of PyTorch layers around an MLP computed in JAX."""

    def __init__(self, in_jax: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.mlp = nn.Linear(6, 8), tiled_torch.TiledMLP(8, 12, num_shards=3)
        self.op = jax_function(partial(tiled_jax.tiled_mlp, num_shards=3)) if in_jax else None

    def forward(self, x: Tensor) -> Tensor:
        x, mlp = self.before(x), self.mlp
        return self.op(x, mlp.w_gate.T, mlp.w_up.T, mlp.w_down.T) if self.op else mlp(x)


def test_a_model_with_the_jax_mlp_trains_like_the_one_without() -> None:
    (x,) = draw((10, 6))
    losses = {}
    for in_jax in (True, False):
        model = Inside(in_jax)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            losses.setdefault(in_jax, []).append(loss.detach().numpy())
        assert losses[in_jax][-1] < losses[in_jax][0]
    np.testing.assert_allclose(losses[True], losses[False], rtol=DEMO_LOSS_RTOL)


@pytest.mark.parametrize("fn", [tanh_product, partial(tiled_jax.tiled_mlp, num_shards=2)], ids=["product", "tiled_mlp"])
def test_bits_are_those_of_jax(fn: Any) -> None:
    tensors = draw((7, 8), (8, 12)) if fn is tanh_product else draw((7, 8), (8, 12), (8, 12), (12, 8))
    arrays = [to_jax(tensor) for tensor in tensors]

    @jax.jit
    def value_and_gradients(dy: Any, *arrays: Any) -> Any:
        y, pull = jax.vjp(fn, *arrays)
        return y, *pull(dy)

    op = jax_function(fn)
    y = op(*tensors)
    (dy,) = draw(tuple(y.shape))
    y.backward(dy.detach())
    found = [y.detach(), *(tensor.grad for tensor in tensors)]
    for ours, theirs in zip(found, value_and_gradients(to_jax(dy), *arrays), strict=True):
        assert torch.equal(ours, to_torch(theirs))
    with torch.no_grad():
        assert torch.equal(op(*tensors), to_torch(jax.jit(fn)(*arrays)))


def many(x: Any, y: Any, z: Any) -> Any:
    return {
        "a": jnp.sin(x) * y,
        "b": (jnp.sum(x.astype(z.dtype) * z, -1), None),
        "c": [jnp.abs(z), jnp.exp(1j * x.astype(z.dtype))],
    }


def test_gradients_of_many_outputs_and_complex_numbers_in_float64() -> None:
    x, y = draw((2, 3), (3,), dtype=torch.float64)
    (z,) = draw((2, 3), dtype=torch.complex128)
    op = jax_function(many)

    def flat(*inputs: Tensor) -> tuple[Tensor, ...]:
        out = op(*inputs)
        return out["a"], out["b"][0], *out["c"]

    with jax.enable_x64(True):
        assert torch.autograd.gradcheck(flat, (x, y, z))


def test_arguments_and_results_keep_their_structure() -> None:
    x, w = draw((2, 3), (3, 4))

    def fn(x: Any, params: Any, *, scale: Any, nothing: Any = None) -> Any:
        assert nothing is None
        return {"y": (x @ params["w"] * scale,), "count": params["n"] + 1, "none": None}

    out = jax_function(fn)(x, {"w": w, "n": torch.tensor([1, 2], dtype=torch.int32)}, scale=torch.tensor(2.0))
    assert list(out) == ["count", "none", "y"]
    assert out["none"] is None
    assert torch.equal(out["count"], torch.tensor([2, 3], dtype=torch.int32))
    assert not out["count"].requires_grad
    assert isinstance(out["y"], tuple)
    out["y"][0].sum().backward()
    assert_near(w.grad, 2 * x.detach().sum(0)[:, None].expand(3, 4))


def test_only_what_requires_a_gradient_gets_one(product: Any) -> None:
    x, w = draw((4, 5), (5, 6))
    frozen = w.detach()
    product(x, frozen).sum().backward()
    alone = x.grad.clone()
    assert frozen.grad is None
    x.grad = None
    product(x, w).sum().backward()
    assert torch.equal(x.grad, alone)
    assert not product(x.detach(), frozen).requires_grad


def test_an_input_without_influence_gets_zeros_and_unused_outputs_cost_nothing() -> None:
    x, w = draw((4,), (4,))
    used, _ = jax_function(lambda x, w: (2 * x, jnp.log(w)))(x, w)
    used.sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 2.0))
    assert torch.equal(w.grad, torch.zeros(4))


def test_a_result_without_tensors() -> None:
    assert jax_function(lambda x: None)(draw((3,))[0]) is None


@pytest.mark.parametrize("which", [0, 1])
def test_a_needed_input_changed_in_place_is_noticed(product: Any, which: int) -> None:
    inputs = draw((4, 5), (5, 6))
    y = product(*inputs)
    with torch.no_grad():
        inputs[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_other_changes_in_place_do_no_harm() -> None:
    """Of an input that backward does not need, and of a result, whose memory is nobody else's."""
    x, w = draw((4,), (4,))
    y = jax_function(lambda x, w: jnp.exp(x) + w)(x, w)
    with torch.no_grad():
        w.mul_(2)
    y.mul_(3)
    y.sum().backward()
    assert torch.equal(w.grad, torch.full((4,), 3.0))
    assert_near(x.grad, 3 * x.detach().exp())


def test_results_and_gradients_never_share_memory() -> None:
    """jit forwards nothing: an output that is an input, twice the same output, one gradient for two inputs."""
    x, w = draw((64, 64), (64, 64))
    constant = jnp.ones((64, 64))
    outputs = jax_function(lambda x, w: (x, x, w + x, constant))(x, w)
    dys = [torch.ones(64, 64) for _ in outputs]
    gradients = torch.autograd.grad(outputs[:3], (x, w), dys[:3])
    found = [a.data_ptr() for a in (x, w, *outputs, *dys, *gradients)]
    assert len(set(found)) == len(found)
    assert constant.unsafe_buffer_pointer() not in found


def test_accumulated_gradients_stay_apart() -> None:
    x, w = draw((4,), (4,))
    add = jax_function(jnp.add)
    for _ in range(3):
        add(x, w).sum().backward()
    add(x, w.detach()).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 4.0))
    assert torch.equal(w.grad, torch.full((4,), 3.0))


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
def test_inputs_and_upstream_gradients_of_any_layout(product: Any, layout: str) -> None:
    adapter = ADAPTERS["torch"]
    (x, w, dy) = draw((6, 5), (5, 8), (6, 8))
    if layout == "expanded":
        x, dy = (a.detach()[:1].expand_as(a).contiguous().requires_grad_() for a in (x, dy))
    want = product(x, w)
    want.backward(dy.detach())
    bases = [adapter.lay_out(a.detach(), layout) for a in (x, dy)]
    laid_x, laid_dy = (view(base) for base, view in bases)
    laid_x.requires_grad_()
    got = product(laid_x, w.detach())
    got.backward(laid_dy)
    assert torch.equal(got, want)
    assert torch.equal(laid_x.grad, x.grad)


def test_backward_twice(product: Any) -> None:
    x, w = draw((4, 5), (5, 6))
    y = product(x, w).sum()
    y.backward(retain_graph=True)
    once = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_a_second_derivative_is_refused(product: Any) -> None:
    x, w = draw((4, 5), (5, 6))
    with pytest.raises(UnsupportedError) as caught:
        torch.autograd.grad(product(x, w).sum(), x, create_graph=True)
    assert str(caught.value) == (
        "jax_function: create_graph must be False in backward, got True. Differentiate twice inside fn, with jax.grad."
    )


def test_traced_once_per_shapes_and_wanted_gradients() -> None:
    traces = []

    def fn(x: Any, w: Any) -> Any:
        traces.append(x.shape)
        return x * w

    op = jax_function(fn)
    x, w = draw((4,), (4,))
    for _ in range(3):
        op(x, w).sum().backward()
    assert len(traces) == 1
    op(x.detach(), w)
    op(x, w.detach())
    op(*draw((5,), (5,)))
    assert len(traces) == 4
    with torch.no_grad():
        op(x, w)
    op(x, w).sum().backward()
    with torch.no_grad():
        op(x, w)
    assert len(traces) == 5


def test_checkpointing_sees_what_backward_needs(product: Any) -> None:
    x, w = draw((4, 5), (5, 5))

    def region(x: Tensor) -> Tensor:
        return product(product(x * 2, w), w)

    region(x).sum().backward()
    want, x.grad = x.grad, None
    live = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (live.append(t.shape), t.clone())[1], lambda t: t):
        y = checkpoint(region, x, use_reentrant=False)
        assert live.count((4, 5)) == 1  # the argument of the region; nothing that JAX computed
        assert (5, 5) not in live
        y.sum().backward()
    assert torch.equal(x.grad, want)


def test_the_jax_mlp_keeps_its_inputs_uncopied_and_nothing_else() -> None:
    """Besides arrays without elements, whose shapes say which operands need a gradient."""
    inputs = draw((6, 8), (8, 12), (8, 12), (12, 8))
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        jax_function(partial(tiled_jax.tiled_mlp, num_shards=2))(*inputs)
    assert [t.data_ptr() for t in kept if t.numel()] == [tensor.data_ptr() for tensor in inputs]


def test_saved_tensor_hooks_hold_what_backward_needs() -> None:
    """What the hooks hand back is what backward uses, wherever it lies in memory."""
    x, w = draw((4, 5), (4, 5))
    op = jax_function(lambda x, w: jnp.exp(x) + jnp.sin(w))
    op(x, w).sum().backward()
    want = x.grad, w.grad
    x.grad = w.grad = None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: torch.stack([t, 3 * t], -1), lambda t: t[..., 1]):
        op(x, w).sum().backward()
    assert_near(x.grad, 3 * want[0])
    assert_near(w.grad, 3 * want[1])


def test_nothing_outlives_the_graph(product: Any) -> None:
    x, w = draw((4, 5), (5, 6))
    y = product(x * 1, w)
    node, out = weakref.ref(y.grad_fn), weakref.ref(y)
    gc.disable()
    try:
        del y
        assert node() is None
        assert out() is None
    finally:
        gc.enable()


def dropout(x: Any, key: Any) -> Any:
    def body(x: Any, key: Any) -> Any:
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x * x, 0)

    return jax.checkpoint(body)(x, jax.random.wrap_key_data(key))


def test_random_keys_among_the_residuals() -> None:
    (x,) = draw((1000,))
    y = jax_function(dropout)(x, torch.tensor([0, 7], dtype=torch.uint32))
    y.sum().backward()
    assert 0.4 < (y != 0).float().mean() < 0.6
    assert torch.equal(x.grad, torch.where(y != 0, 2 * x, 0).detach())


def test_float64_holds_in_a_backward_outside_of_the_setting() -> None:
    x, w = draw((4, 5), (5, 6), dtype=torch.float64)
    op = jax_function(tanh_product)
    with jax.enable_x64(True):
        y = op(x, w)
    assert y.dtype == torch.float64
    y.sum().backward()
    want = torch.autograd.grad(torch.tanh(x @ w).sum(), (x, w))
    for found, wanted in zip((x.grad, w.grad), want, strict=True):
        assert_near(found, wanted)
    with pytest.raises(TypeError, match=r"^to_jax: tensor must be of at most 32 bits a number"):
        op(x, w)


def test_the_matmul_precision_of_the_forward_holds_in_backward() -> None:
    seen = []

    @jax.custom_vjp
    def fn(x: Any) -> Any:
        return x

    def backward(_: Any, dy: Any) -> Any:
        seen.append(jax.config.jax_default_matmul_precision)
        return (dy,)

    fn.defvjp(lambda x: (x, None), backward)
    (x,) = draw((3,))
    with jax.default_matmul_precision("highest"):
        y = jax_function(fn)(x)
    y.sum().backward()
    assert seen == ["highest"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
def test_compiled_models_break_their_graph_here(product: Any) -> None:
    x, w = draw((4, 5), (5, 6))
    want = torch.autograd.grad(product(x * 2, w).sin().sum(), (x, w))
    compiled = torch.compile(lambda x, w: product(x * 2, w).sin(), backend="eager")
    got = torch.autograd.grad(compiled(x, w).sum(), (x, w))
    assert all(map(torch.equal, got, want))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a function of jax_function runs in JAX"):
        torch.compile(lambda x: product(x, w), backend="eager", fullgraph=True)(x)


def test_autocast_and_inference_mode_change_nothing(product: Any) -> None:
    x, w = draw((4, 5), (5, 6))
    want = product(x, w).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = product(x, w)
        assert torch.equal(y, want)
        y.sum().backward()
    assert x.grad.dtype == torch.float32
    with torch.inference_mode():
        assert torch.equal(product(x, w), want)


def test_what_is_no_tensor_is_refused(product: Any) -> None:
    x, w = draw((4, 5), (5, 6))
    with pytest.raises(TypeError) as caught:
        product(x, 2.0)
    assert str(caught.value) == (
        "jax_function: every argument must be a torch.Tensor or a pytree of them, got float. "
        "Bind other values with functools.partial."
    )
    with pytest.raises(TypeError, match=r"^jax_function: fn must be callable, got int\.$"):
        jax_function(3)
    with pytest.raises(SpecError, match=r"^jax_function: every argument must be on one device, cpu, got meta\.$"):
        product(x, w.to("meta"))
    with pytest.raises(TypeError, match=r"got one inside torch\.func"):
        torch.func.grad(lambda x: product(x, w).sum())(x)


def test_an_error_of_the_function_comes_through(product: Any) -> None:
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        product(*draw((4, 5), (6, 7)))
