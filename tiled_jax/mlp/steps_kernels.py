"""The steps of one shard of the MLP by Pallas kernels; a derivative of one, which only a second derivative of the MLP needs,
is that of the formula it stands for."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from shared_specs.kernels.blocks import PALLAS_UNMEASURED, Paths
from shared_specs.shards import KERNEL_MULTIPLE
from tiled_jax.core.mosaic import differentiated_as, interpreter
from tiled_jax.mlp.kernels import dgated, glu_elementwise, glu_up, glu_up_aux, weight_gradient
from tiled_jax.mlp.kernels import linear as products
from tiled_jax.mlp.math import ArrayMap
from tiled_jax.mlp.steps import XLA, MLPSteps


@dataclass(frozen=True)
class KernelMLPSteps(MLPSteps):
    """`paths` names who makes which product, XLA or a kernel; with `interpret` kernels run in JAX's GPU interpreter."""

    paths: Paths = PALLAS_UNMEASURED
    interpret: bool = False
    backend: ClassVar[str] = "pallas"
    multiple: ClassVar[int] = KERNEL_MULTIPLE

    def linear(self, x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        if self.paths.products != "kernel":
            return XLA.linear(x, weight, bias)

        def kernel(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
            return products.linear(x, weight, bias=bias, interpret=self._interpreter())

        return differentiated_as(XLA.linear, kernel)(x, weight, bias)

    def gate_and_up(self, x: jax.Array, w: ArrayMap) -> dict[str, jax.Array]:
        if not self._dual(w):
            return super().gate_and_up(x, w)

        def kernel(x: jax.Array, w: ArrayMap) -> dict[str, jax.Array]:
            options: dict[str, Any] = {"b_gate": w.get("b_gate"), "b_up": w.get("b_up")}
            gate, up = glu_up.gate_and_up(x, w["w_gate"], w["w_up"], **options, interpret=self._interpreter())
            return {"gate": gate, "up": up}

        return differentiated_as(XLA.gate_and_up, kernel)(x, _up_weights(w))

    def hidden(
        self, x: jax.Array, w: ArrayMap, activation: str, *, keep: bool = False
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        if self.paths.up == "auxiliary" and "w_gate" in w and not keep:
            return self._hidden_of_gate(x, w, activation), {}
        if not self._dual(w):
            return super().hidden(x, w, activation, keep=keep)

        def kernel(x: jax.Array, w: ArrayMap) -> tuple[jax.Array, dict[str, jax.Array]]:
            options: dict[str, Any] = {"b_gate": w.get("b_gate"), "b_up": w.get("b_up"), "activation": activation}
            found = glu_up.glu_up(x, w["w_gate"], w["w_up"], **options, keep=keep, interpret=self._interpreter())
            return (found[0], {"gate": found[1], "up": found[2]}) if keep else (found, {})

        formula = partial(XLA.hidden, activation=activation, keep=keep)
        return differentiated_as(formula, kernel)(x, _up_weights(w))

    def _hidden_of_gate(self, x: jax.Array, w: ArrayMap, activation: str) -> jax.Array:
        """Return h of one shard: gate by XLA's product, then the kernel that makes up and h in one pass."""

        def kernel(x: jax.Array, w_up: jax.Array, b_up: jax.Array | None, gate: jax.Array) -> jax.Array:
            options: dict[str, Any] = {"activation": activation, "interpret": self._interpreter()}
            return glu_up_aux.glu_up_auxiliary(x, w_up, gate, b_up=b_up, **options)

        def formula(x: jax.Array, w_up: jax.Array, b_up: jax.Array | None, gate: jax.Array) -> jax.Array:
            return XLA.activated({"gate": gate, "up": XLA.linear(x, w_up, b_up)}, activation)

        gate = self.linear(x, w["w_gate"], w.get("b_gate"))
        return differentiated_as(formula, kernel)(x, w["w_up"], w.get("b_up"), gate)

    def activated(self, pre: ArrayMap, activation: str) -> jax.Array:
        if self.paths.products != "kernel":
            return XLA.activated(pre, activation)

        def kernel(pre: ArrayMap) -> jax.Array:
            options: dict[str, Any] = {"activation": activation, "interpret": self._interpreter()}
            return glu_elementwise.glu(pre.get("gate"), pre["up"], **options)

        return differentiated_as(partial(XLA.activated, activation=activation), kernel)(pre)

    def pre_activation_gradients(
        self, dy: jax.Array, pre: ArrayMap, w_down: jax.Array, activation: str
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        if "gate" not in pre or self.paths.down != "dgated":
            return super().pre_activation_gradients(dy, pre, w_down, activation)

        def kernel(dy: jax.Array, pre: ArrayMap, w_down: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
            options: dict[str, Any] = {"activation": activation, "interpret": self._interpreter()}
            dgate, dup, h = dgated.dgated(dy, w_down, pre["gate"], pre["up"], **options)
            return h, {"gate": dgate, "up": dup}

        formula = partial(XLA.pre_activation_gradients, activation=activation)
        return differentiated_as(formula, kernel)(dy, pre, w_down)

    def activation_gradients(
        self, dh: jax.Array, pre: ArrayMap, activation: str
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        if self.paths.products != "kernel":
            return XLA.activation_gradients(dh, pre, activation)

        def kernel(dh: jax.Array, pre: ArrayMap) -> tuple[jax.Array, dict[str, jax.Array]]:
            options: dict[str, Any] = {"activation": activation, "interpret": self._interpreter()}
            dgate, dup, h = glu_elementwise.glu_backward(dh, pre.get("gate"), pre["up"], **options)
            return h, {"up": dup} if dgate is None else {"gate": dgate, "up": dup}

        return differentiated_as(partial(XLA.activation_gradients, activation=activation), kernel)(dh, pre)

    def dx(self, d: ArrayMap, w: ArrayMap) -> jax.Array:
        if self.paths.products != "kernel":
            return XLA.dx(d, w)

        def kernel(d: ArrayMap, w: ArrayMap) -> jax.Array:
            return products.dx(d.get("gate"), d["up"], w.get("gate"), w["up"], interpret=self._interpreter())

        return differentiated_as(XLA.dx, kernel)(d, w)

    def added(self, total: jax.Array, rows: jax.Array | None, d: jax.Array) -> jax.Array:
        if self.paths.weight_gradient != "kernel":
            return XLA.added(total, rows, d)
        # A bias's gradient is the product of the tokens with ones.
        rows = jnp.ones((d.shape[0], KERNEL_MULTIPLE), d.dtype) if rows is None else rows
        return differentiated_as(XLA.added, self._added)(total, rows, d)

    def _added(self, total: jax.Array, rows: jax.Array, d: jax.Array) -> jax.Array:
        """total + rows^T d, in place of total."""
        return weight_gradient.weight_gradient(total, rows, d, interpret=self._interpreter())

    def later(self, first: jax.Array, x: jax.Array) -> jax.Array:
        return x

    def sum_shape(self, operand: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Rows of a bias's sum are all the same."""
        in_rows = operand.startswith("b_") and self.paths.weight_gradient == "kernel"
        return (KERNEL_MULTIPLE, *shape) if in_rows else shape

    def _dual(self, w: ArrayMap) -> bool:
        return "w_gate" in w and self.paths.up == "dual"

    def _interpreter(self) -> Any:
        return interpreter() if self.interpret else None


def _up_weights(w: ArrayMap) -> dict[str, jax.Array]:
    return {name: w[name] for name in ("w_gate", "w_up", "b_gate", "b_up") if name in w}
