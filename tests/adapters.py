"""One adapter per half: runs a case and returns NumPy arrays in the specification's layout. Gradients are returned
values, never `.grad`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from shared_specs.config import DIFFERENTIABLE_OUTPUTS, LossResult, Tiling
from shared_specs.loss.cases import LossCase, loss_options, make_loss_inputs
from shared_specs.mlp.cases import MLPCase, make_inputs
from shared_specs.moe.cases import WEIGHTS, MoECase, make_moe_inputs
from shared_specs.reference import is_frozen
from tests.asserting import assert_near

Array = np.ndarray[Any, Any]
Results = dict[str, Array | None]


def loss_call(case: LossCase, arrays: dict[str, Any], backend: str) -> dict[str, Any]:
    """The keyword arguments of `tiled_linear_cross_entropy`, with arrays of either framework."""
    tiling = {"num_shards": case.num_shards}
    if case.vocab_shards is not None:
        tiling = {"tiling": Tiling(num_shards=case.num_shards, vocab_shards=case.vocab_shards)}
    return {"loss": loss_options(case, arrays.get("class_weight")), "backend": backend, **tiling}


def loss_results(case: LossCase, result: Any) -> tuple[dict[str, Any], list[str]]:
    """Every result by name, and the names of those that an upstream gradient exists for."""
    found = result._asdict() if isinstance(result, LossResult) else {"loss": result}
    assert isinstance(result, LossResult) == bool(case.outputs)
    assert [name for name, value in found.items() if value is None] == [
        name for name in found if name not in ("loss", *case.outputs)
    ]
    kept = {name: value for name, value in found.items() if value is not None}
    return kept, ["loss", *(name for name in case.outputs if name in DIFFERENTIABLE_OUTPUTS)]


def fused_frozen(case: MLPCase, name: str) -> bool:
    """Whether x or a parameter of a module with one [gate; up] weight needs no gradient."""
    return name.replace("_gate_up", "_gate") in case.frozen


def moe_call(case: MoECase, backend: str) -> dict[str, Any]:
    """The keyword arguments of `tiled_moe`."""
    names = ("top_k", "scoring", "normalize_top_k", "activation", "num_shards")
    return {name: getattr(case, name) for name in names} | {"return_router_logits": case.logits, "backend": backend}


class NumpyAdapter:
    """The specification itself behind the same calls, so that the suite can be tried without a framework."""

    half, backends = "numpy", ("oracle",)

    def run(self, case: MLPCase, backend: str = "oracle") -> Results:
        from shared_specs.core.rounding import DTYPES
        from shared_specs.reference import baseline

        return {name: value.astype(DTYPES[case.dtype]) for name, value in baseline(case).items()}


class TorchAdapter:
    """tiled_torch. Arrays are laid out in memory as the case says; weights are handed over [out, in]."""

    half, backends = "torch", ("eager",)

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def from_numpy(self, array: Array) -> Any:
        import torch

        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16).to(self.device)
        return torch.from_numpy(array.copy()).to(self.device)

    def to_numpy(self, tensor: Any) -> Array | None:
        import torch

        if tensor is None:
            return None
        tensor = tensor.detach().contiguous().cpu()
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    def lay_out(self, tensor: Any, layout: str) -> tuple[Any, Any]:
        """(the storage's tensor, the view to hand over), of the same values."""
        if layout == "sliced":
            base = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 3), 7)
            base[..., 1:-2] = tensor
            return base, lambda base: base[..., 1:-2]
        if layout == "transposed":
            return tensor.transpose(0, 1).contiguous(), lambda base: base.transpose(0, 1)
        if layout == "expanded":
            return tensor[..., :1, :].clone(), lambda base: base.expand(tensor.shape)
        if layout != "contiguous":
            raise ValueError(f"a layout must be contiguous, sliced, transposed or expanded, got {layout!r}")
        return tensor, lambda base: base

    def run(self, case: MLPCase, backend: str = "eager") -> Results:
        import torch

        arrays = {name: self.from_numpy(array) for name, array in make_inputs(case).items()}
        base, view = self.lay_out(arrays["x"], case.x_layout)
        base.requires_grad_("x" not in case.frozen)
        x = view(base) if case.x_layout != "contiguous" else base
        dy_base, dy_view = self.lay_out(arrays["dy"], case.dy_layout)
        weights = {
            name: (array.T.contiguous() if name.startswith("w") else array).requires_grad_(name not in case.frozen)
            for name, array in arrays.items()
            if name[0] in "wb"
        }
        y, leaves = self.call(case, x, weights, backend)
        wanted = {"x": x, **leaves} if "x" not in case.frozen else leaves
        grads = dict(
            zip(wanted, torch.autograd.grad(y, list(wanted.values()), dy_view(dy_base), retain_graph=True), strict=True)
        )
        if x is not base and "x" in grads:  # the gradient must also arrive behind the view
            (behind,) = torch.autograd.grad(y, [base], dy_view(dy_base))
            (expected,) = torch.autograd.grad(x, [base], grads["x"])
            assert_near(behind, expected, "the gradient behind the view")
        if "w_gate_up" in grads:
            grads |= dict(zip(("w_gate", "w_up"), grads.pop("w_gate_up").chunk(2), strict=True))
        if "b_gate_up" in grads:
            grads |= dict(zip(("b_gate", "b_up"), grads.pop("b_gate_up").chunk(2), strict=True))
        results = {"y": y} | {f"d{name}": grad.T if name.startswith("w") else grad for name, grad in grads.items()}
        return {name: self.to_numpy(tensor) for name, tensor in results.items()}

    def call(self, case: MLPCase, x: Any, weights: dict[str, Any], backend: str) -> tuple[Any, dict[str, Any]]:
        """y, and the operands that require gradients, by name."""
        from tiled_torch import TiledMLP, tiled_mlp

        biases = {name[2:]: bias for name, bias in weights.items() if name.startswith("b_")}
        options: dict[str, Any] = {"num_shards": case.num_shards, "keep": case.keep, "backend": backend}
        options |= {"activation": case.activation, "biases": biases}
        operands = (weights.get("w_gate"), weights["w_up"], weights["w_down"])
        if case.fused:
            module = TiledMLP.from_weights(*operands, fused_gate_up=True, **options)
            for name, param in module.named_parameters():
                param.requires_grad_(not fused_frozen(case, name))
            return module(x), {name: param for name, param in module.named_parameters() if param.requires_grad}
        leaves = {name: weight for name, weight in weights.items() if name not in case.frozen}
        return tiled_mlp(x, *operands, **options), leaves

    def run_loss(self, case: LossCase, backend: str = "eager") -> Results:
        import torch

        from tiled_torch import tiled_linear_cross_entropy

        arrays = {name: self.from_numpy(array) for name, array in make_loss_inputs(case).items()}
        wanted = {
            name: arrays[name].requires_grad_()
            for name in ("x", "weight", "bias")
            if name in arrays and name not in case.frozen
        }
        weight = arrays["weight"].T if "weight" in wanted else arrays["weight"].T.contiguous()
        result = tiled_linear_cross_entropy(
            arrays["x"], weight, arrays["targets"], bias=arrays.get("bias"), **loss_call(case, arrays, backend)
        )
        found, differentiated = loss_results(case, result)
        outputs, upstream = [found[name] for name in differentiated], [arrays[f"d{name}"] for name in differentiated]
        grads = torch.autograd.grad(outputs, list(wanted.values()), upstream)
        results = found | {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}
        return {name: self.to_numpy(tensor) for name, tensor in results.items()}

    def run_moe(self, case: MoECase, backend: str = "eager") -> Results:
        import torch

        from tiled_torch import tiled_moe

        found = {name: self.from_numpy(array) for name, array in make_moe_inputs(case).items()}
        arrays = {name: a.transpose(-1, -2).contiguous() if name[0] == "w" else a for name, a in found.items()}
        wanted = {name: arrays[name].requires_grad_() for name in ("x", *WEIGHTS) if name not in case.frozen}
        result = tiled_moe(arrays["x"], *(arrays[name] for name in WEIGHTS), **moe_call(case, backend))
        results = dict(zip(("y", "logits"), result if case.logits else (result,), strict=False))
        grads = torch.autograd.grad([*results.values()], [*wanted.values()], [arrays[f"d{name}"] for name in results])
        results |= {f"d{n}": d.transpose(-1, -2) if n[0] == "w" else d for n, d in zip(wanted, grads, strict=True)}
        return {name: self.to_numpy(tensor) for name, tensor in results.items()}


class JaxAdapter:
    """tiled_jax, under jit. Arrays have no strides in JAX, so a case's layouts only change nothing; weights [in, out]."""

    half, backends = "jax", ("xla",)

    def from_numpy(self, array: Array) -> Any:
        import jax.numpy as jnp

        return jnp.asarray(array)

    def to_numpy(self, array: Any) -> Array:
        return np.asarray(array)

    @contextmanager
    def precision(self, case: MLPCase) -> Iterator[None]:
        """64-bit types for float64 cases only."""
        import jax

        with jax.enable_x64(case.dtype == "float64"):
            yield

    def run(self, case: MLPCase, backend: str = "xla") -> Results:
        return {name: self.to_numpy(array) for name, array in self.arrays(case, backend).items()}

    @staticmethod
    @cache  # compiling is most of the time, and the comparison of the halves asks for the same arrays
    def arrays(case: MLPCase, backend: str) -> dict[str, Any]:
        """y and the gradients as jax arrays."""
        import jax

        self = ADAPTERS["jax"]
        with self.precision(case):
            arrays = {name: self.from_numpy(array) for name, array in make_inputs(case).items()}
            dy = arrays.pop("dy")
            wanted = {name: array for name, array in arrays.items() if not is_frozen(case, f"d{name}")}
            fixed = {name: array for name, array in arrays.items() if name not in wanted}
            call, wanted = self.callable(case, backend, wanted, fixed)

            def y_and_gradients(wanted: dict[str, Any], dy: Any) -> tuple[Any, Any]:
                y, pull = jax.vjp(call, wanted)
                return y, pull(dy)[0]

            y, grads = jax.jit(y_and_gradients)(wanted, dy)
            for kind in ("w", "b"):
                if f"{kind}_gate_up" in grads:
                    both = grads.pop(f"{kind}_gate_up")
                    half = both.shape[-1] // 2
                    grads |= {f"{kind}_gate": both[..., :half], f"{kind}_up": both[..., half:]}
            return {"y": y} | {f"d{name}": grad for name, grad in grads.items()}

    def callable(
        self, case: MLPCase, backend: str, wanted: dict[str, Any], fixed: dict[str, Any]
    ) -> tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]:
        """A function of the operands that need gradients, and those operands by name."""
        from tiled_jax import TiledMLP, tiled_mlp

        options: dict[str, Any] = {"num_shards": case.num_shards, "keep": case.keep, "backend": backend}
        options |= {"activation": case.activation}

        def split(operands: dict[str, Any]) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
            biases = {name[2:]: bias for name, bias in operands.items() if name.startswith("b_")}
            return (operands.get("w_gate"), operands["w_up"], operands["w_down"]), biases

        if case.fused:
            from flax import nnx

            weights, biases = split(wanted | fixed)
            module = TiledMLP.from_weights(*weights, biases=biases, fused_gate_up=True, **options)
            graph, state = nnx.split(module)
            params = {path[0]: value for path, value in nnx.to_flat_state(state)}

            given = {"x": (wanted | fixed)["x"]} | {name: param[...] for name, param in params.items()}

            def call_module(operands: dict[str, Any]) -> Any:
                values = {(name,): params[name].replace((given | operands)[name]) for name in params}
                return nnx.merge(graph, nnx.from_flat_state(values))((given | operands)["x"])

            return call_module, {name: value for name, value in given.items() if not fused_frozen(case, name)}

        def call(operands: dict[str, Any]) -> Any:
            weights, biases = split(operands | fixed)
            return tiled_mlp((operands | fixed)["x"], *weights, biases=biases, **options)

        return call, wanted

    def run_loss(self, case: LossCase, backend: str = "xla") -> Results:
        return {name: self.to_numpy(array) for name, array in self.loss_arrays(case, backend).items()}

    @staticmethod
    @cache
    def loss_arrays(case: LossCase, backend: str) -> dict[str, Any]:
        """Every result and gradient as jax arrays."""
        import jax

        from tiled_jax import tiled_linear_cross_entropy

        self = ADAPTERS["jax"]
        with self.precision(case):
            arrays = {name: self.from_numpy(array) for name, array in make_loss_inputs(case).items()}
            operands = {name: arrays[name] for name in ("x", "weight", "bias") if name in arrays}
            wanted = {name: array for name, array in operands.items() if name not in case.frozen}

            def call(wanted: dict[str, Any]) -> Any:
                given = operands | wanted
                x, weight, bias = given["x"], given["weight"], given.get("bias")
                options = loss_call(case, arrays, backend)
                return tiled_linear_cross_entropy(x, weight, arrays["targets"], bias=bias, **options)

            def results_and_gradients(wanted: dict[str, Any]) -> dict[str, Any]:
                result, pull = jax.vjp(call, wanted)
                found, differentiated = loss_results(case, result)
                zeros = {name: jax.numpy.zeros_like(value) for name, value in found.items()}
                upstream = zeros | {name: arrays[f"d{name}"] for name in differentiated}
                (grads,) = pull(LossResult(**upstream) if case.outputs else upstream["loss"])
                return found | {f"d{name}": grad for name, grad in grads.items()}

            return jax.jit(results_and_gradients)(wanted)

    def run_moe(self, case: MoECase, backend: str = "xla") -> Results:
        return {name: self.to_numpy(array) for name, array in self.moe_arrays(case, backend).items()}

    @staticmethod
    @cache
    def moe_arrays(case: MoECase, backend: str) -> dict[str, Any]:
        """Every result and gradient as jax arrays."""
        import jax

        from tiled_jax import tiled_moe

        self = ADAPTERS["jax"]
        with self.precision(case):
            arrays = {name: self.from_numpy(array) for name, array in make_moe_inputs(case).items()}
            wanted = {name: arrays[name] for name in ("x", *WEIGHTS) if name not in case.frozen}

            def call(wanted: dict[str, Any]) -> dict[str, Any]:
                given = arrays | wanted
                result = tiled_moe(given["x"], *(given[name] for name in WEIGHTS), **moe_call(case, backend))
                return dict(zip(("y", "logits"), result if case.logits else (result,), strict=False))

            def results_and_gradients(wanted: dict[str, Any]) -> dict[str, Any]:
                found, pull = jax.vjp(call, wanted)
                (grads,) = pull({name: arrays[f"d{name}"] for name in found})
                return found | {f"d{name}": grad for name, grad in grads.items()}

            return jax.jit(results_and_gradients)(wanted)


ADAPTERS: dict[str, Any] = {"torch": TorchAdapter(), "jax": JaxAdapter(), "numpy": NumpyAdapter()}
