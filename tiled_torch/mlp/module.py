"""`TiledMLP`: the parameters of a token-wise MLP and one call of `tiled_mlp`. No math."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from shared_specs.config import TORCH, Activation, Tiling
from shared_specs.errors import UnsupportedError, error_text, fail, fail_type
from shared_specs.mlp import checks as mlp_checks
from tiled_torch import backends
from tiled_torch.core.activation_functions import ActivationFunction, activation_name
from tiled_torch.core.gradients import fused_halves
from tiled_torch.core.operands import as_operand, check_param_dtype
from tiled_torch.core.partitioned import gathering, whole_shape
from tiled_torch.mlp.api import tiled_mlp


def projection_order(names: Iterable[str]) -> list[str]:
    """Return the names of parameters with each weight's bias next to it, the order in which they are made and drawn."""
    order = ("gate_up", "gate", "up", "down")
    return sorted(names, key=lambda name: (order.index(name[2:]), name[0] == "b"))


def _bias_of_plain(function: str, name: str, layer: Any) -> dict[str, Any]:
    """Return the bias of an nn.Linear by the name of its projection, if it has one.

    Raises:
        TypeError: no module. UnsupportedError: the layer is more than its weight and bias.
    """
    if not isinstance(layer, nn.Module):
        fail_type(function, name, "an nn.Linear", type(layer).__name__)
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    reason = type(layer).__name__ if type(layer) is not nn.Linear else "one with hooks" if any(hooks) else None
    reason = "one with a forward of its own" if reason is None and "forward" in vars(layer) else reason
    if reason is not None:
        advice = "A layer that has to be called is a part of a module for tile."
        raise UnsupportedError(error_text(function, name, "a plain nn.Linear", reason, advice=advice))
    return {} if layer.bias is None else {name: layer.bias}


def _as_layer(weight: Any, bias: Any) -> nn.Linear | None:
    """Return a layer of these parameters themselves; None without a weight."""
    if weight is None:
        return None
    layer = nn.Linear(1, 1, bias=bias is not None, device="meta")
    layer.out_features, layer.in_features = weight.shape
    layer.weight = weight
    if bias is not None:
        layer.bias = bias
    return layer


class MLPParameters:
    """The part of a module that owns an MLP's parameters: which of them are which operand."""

    w_down: Any

    def _pair(self, prefix: str) -> tuple[Tensor | None, Tensor | None]:
        """Return gate and up of weights or biases, as views of the fused parameter where there is one."""
        fused = getattr(self, f"{prefix}_gate_up", None)
        if fused is not None:
            return fused_halves(fused)
        return getattr(self, f"{prefix}_gate", None), getattr(self, f"{prefix}_up", None)

    def _operands(self) -> tuple[Any, dict[str, Tensor]]:
        """Return the weights of gate, up and down, and the biases there are."""
        gate, up = self._pair("b")
        biases = {"gate": gate, "up": up, "down": getattr(self, "b_down", None)}
        return (*self._pair("w"), self.w_down), {name: bias for name, bias in biases.items() if bias is not None}


class TiledMLP(MLPParameters, nn.Module):
    """A gated or plain MLP, computed shard by shard. It replaces gate/up/down linear layers with an activation.

    Args:
        hidden_size, intermediate_size: H and I.
        activation: silu, gelu, gelu_tanh, relu or relu_squared, or a function or module that computes one of them, known by its
            values and slopes: F.silu, nn.GELU(approximate="tanh"), transformers' ACT2FN["silu"]; nn.GELU() is gelu.
        gated: act(x w_gate) * (x w_up) if true, act(x w_up) if false.
        bias: a bias on every projection.
        fused_gate_up: gate and up are one parameter `w_gate_up` [2I, H], gate first.
        num_shards, keep, tiling, backend: as in `tiled_mlp`.
        device, dtype: of the parameters.
    Parameters are `w_gate`, `w_up` [I, H], `w_down` [H, I] (or `w_gate_up`) and, with bias, `b_gate`, `b_up`, `b_down`
    (or `b_gate_up`), initialised as nn.Linear initialises.
    FSDP and ZeRO-3 (also inside deepspeed.zero.Init) gather them around all shards, once for forward and once for backward.
    Raises:
        SpecError, TypeError, UnsupportedError: as `tiled_mlp`, at construction.
    Source: derived in shared_specs/README.md.
    Example:
        >>> import torch
        >>> TiledMLP(8, 12, num_shards=4)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation | ActivationFunction = "silu",
        gated: bool = True,
        bias: bool = False,
        fused_gate_up: bool = False,
        num_shards: int | None = None,
        keep: float = 0.0,
        tiling: Tiling | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kind = {"gated": gated, "bias": bias, "fused_gate_up": fused_gate_up}
        shapes = mlp_checks.module_shapes("TiledMLP", hidden_size, intermediate_size, **kind, names=TORCH)
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self._set_options(
            activation_name("TiledMLP", activation), gated, fused_gate_up, num_shards, keep, tiling, backend
        )
        check_param_dtype("TiledMLP", dtype)
        for name in projection_order(shapes):
            setattr(self, name, nn.Parameter(torch.empty(shapes[name], device=device, dtype=dtype)))
        self.reset_parameters()

    def _set_options(
        self,
        activation: Activation,
        gated: bool,
        fused_gate_up: bool,
        num_shards: int | None,
        keep: float,
        tiling: Tiling | None,
        backend: str,
    ) -> None:
        options = (activation, gated, fused_gate_up, num_shards, keep, tiling, backend)
        usable = backends.usable_backends()
        self.tiling = mlp_checks.module_tiling("TiledMLP", *options, names=TORCH, usable=usable)
        self.activation, self.gated, self.fused_gate_up, self.backend = activation, gated, fused_gate_up, backend

    @classmethod
    def from_weights(
        cls,
        w_gate: Tensor | None,
        w_up: Tensor,
        w_down: Tensor,
        *,
        biases: Mapping[str, Tensor] | None = None,
        activation: Activation | ActivationFunction = "silu",
        fused_gate_up: bool = False,
        num_shards: int | None = None,
        keep: float = 0.0,
        tiling: Tiling | None = None,
        backend: str = "auto",
    ) -> Self:
        """Return a module around existing weights ([out, in]); they become its parameters without a copy, unless fused.

        Args:
            w_gate, w_up: [I, H]; w_gate None for a plain MLP. w_down: [H_out, I]. biases: any of gate, up, down.
            fused_gate_up: gate and up are concatenated into one parameter (one copy), which is frozen where both of them are.
        """
        options = activation, w_gate is not None, fused_gate_up, num_shards, keep, tiling, backend
        return cls._around("TiledMLP.from_weights", (w_gate, w_up, w_down), biases, *options)

    @classmethod
    def from_linears(
        cls,
        gate: nn.Module | None,
        up: nn.Module,
        down: nn.Module,
        *,
        activation: Activation | ActivationFunction = "silu",
        num_shards: int | None = None,
        keep: float = 0.0,
        tiling: Tiling | None = None,
        backend: str = "auto",
    ) -> Self:
        """Return a module around existing layers, whose parameters become its own: the same ones, not copies.

        Args:
            gate, up, down: nn.Linear [..., H] -> [..., I], the same, [..., I] -> [..., H_out]; gate None for a plain MLP.
        Raises:
            SpecError: sizes or dtypes of the layers disagree. TypeError: one is no module.
            UnsupportedError: one is more than an nn.Linear (LoRA around it, hooks), which has to be called.
        Example:
            >>> up, down = nn.Linear(8, 12), nn.Linear(12, 8)
            >>> TiledMLP.from_linears(nn.Linear(8, 12), up, down, num_shards=4).w_up is up.weight
            True
        """
        function, layers = "TiledMLP.from_linears", {"gate": gate, "up": up, "down": down}
        biases: dict[str, Tensor] = {}
        for name, layer in layers.items():
            if layer is not None or name != "gate":
                biases |= _bias_of_plain(function, name, layer)
        weights: Any = tuple(None if layer is None else layer.weight for layer in layers.values())
        options = activation, gate is not None, False, num_shards, keep, tiling, backend
        return cls._around(function, weights, biases, *options)

    def to_linears(self) -> tuple[nn.Linear | None, nn.Linear, nn.Linear]:
        """Return gate (None in a plain MLP), up and down as layers of the same parameters.

        Raises:
            SpecError: gate and up are one parameter.
        """
        if self.fused_gate_up:
            fail("TiledMLP.to_linears", "fused_gate_up", "False", True, advice="A layer has a parameter of its own.")
        weights, biases = self._operands()
        gate, up, down = (_as_layer(w, biases.get(name)) for w, name in zip(weights, mlp_checks.BIASES, strict=True))
        assert up is not None
        assert down is not None
        return gate, up, down

    @classmethod
    def _around(
        cls,
        function: str,
        operands: tuple[Any, Any, Any],
        biases: Mapping[str, Tensor] | None,
        activation: Activation | ActivationFunction,
        gated: bool,
        fused_gate_up: bool,
        *options: Any,
    ) -> Self:
        """Return a module around weights (gate, up, down) and biases, once they are right. function: in messages."""
        name_of_activation = activation_name(function, activation)
        weights, given = mlp_checks.mlp_operands(function, *operands, biases)
        seen = {name: as_operand(function, name, w) for name, w in weights.items()}
        seen_biases = {name: as_operand(function, f"biases[{name!r}]", b) for name, b in given.items()}
        mlp_checks.check_mlp_weights(
            function, weights=seen, biases=seen_biases, activation=name_of_activation, names=TORCH
        )
        if fused_gate_up:
            mlp_checks.check_fused_biases(function, tuple(given))
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._set_options(name_of_activation, gated, fused_gate_up, *options)
        module.intermediate_size, module.hidden_size = weights["w_up"].shape
        named = {name.removeprefix("w_"): w for name, w in weights.items()}
        module._adopt("w", named, fused_gate_up)
        module._adopt("b", given, fused_gate_up)
        return module

    def _adopt(self, prefix: str, tensors: Mapping[str, Tensor], fused: bool) -> None:
        named = dict(tensors)
        if fused and "gate" in named:
            pair = named.pop("gate"), named.pop("up")
            trains = [not isinstance(tensor, nn.Parameter) or tensor.requires_grad for tensor in pair]
            if trains[0] != trains[1]:
                which = f"{prefix}_gate" if trains[1] else f"{prefix}_up"
                advice = "One parameter trains as a whole: freeze both or neither."
                fail(
                    "TiledMLP.from_weights",
                    "fused_gate_up",
                    f"False where {which} alone is frozen",
                    True,
                    advice=advice,
                )
            named["gate_up"] = nn.Parameter(torch.cat([a.detach() for a in pair]), requires_grad=trains[0])
        for name, tensor in named.items():
            parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor.detach())
            setattr(self, f"{prefix}_{name}", parameter)

    def reset_parameters(self) -> None:
        """Draw every parameter anew, uniformly within 1/sqrt(inputs), as nn.Linear does."""
        for name, parameter in self.named_parameters():
            inputs = whole_shape(getattr(self, "w" + name[1:]))[1]
            with gathering(parameter, write=True):
                nn.init.uniform_(parameter, -1 / math.sqrt(inputs), 1 / math.sqrt(inputs))

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        weights, biases = self._operands()
        return tiled_mlp(
            x,
            *weights,
            biases=biases,
            activation=self.activation,  # type: ignore[arg-type]
            tiling=self.tiling,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        sizes = f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}"
        kind = "gated" if self.gated else "plain"
        return f"{sizes}, {kind}, activation={self.activation}, {self.tiling}, backend={self.backend}"
