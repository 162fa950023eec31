"""What no interpreter sees, in traced programs: operands released too early, registers that nobody has, writes to slices.

JAX's GPU interpreter multiplies at once and takes no notice of `wgmma_wait`; without one a GPU reads what is overwritten. It
knows no registers: a GPU's warpgroup that asks for more than its program was launched with waits for ever.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from shared_specs.kernels.blocks import CANDIDATES, Blocks
from tests.core.jax_counting import jaxprs_in
from tiled_jax.mlp.kernels.dgated import dgated
from tiled_jax.mlp.kernels.glu_up import gate_and_up, glu_up
from tiled_jax.mlp.kernels.glu_up_aux import glu_up_auxiliary
from tiled_jax.mlp.kernels.linear import dx, linear
from tiled_jax.mlp.kernels.weight_gradient import weight_gradient

T, H, I = 512, 512, 1024  # noqa: E741


def shape(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


x, w, w_down, pre = shape(T, H), shape(H, I), shape(I, H), shape(T, I)
silu: dict[str, Any] = {"activation": "silu"}
KERNELS: dict[str, tuple[str, Callable[..., Any], tuple[Any, ...]]] = {
    "glu_up": ("glu_up", partial(glu_up, **silu), (x, w, w)),
    "gate_and_up": ("glu_up", gate_and_up, (x, w, w)),
    "glu_up_aux": ("glu_up_aux", partial(glu_up_auxiliary, **silu), (x, w, pre)),
    "dgated": ("dgated", partial(dgated, **silu), (x, w_down, pre, pre)),
    "linear": ("linear", linear, (pre, w_down)),
    "dx": ("dx", dx, (pre, pre, w, w)),
    "weight_gradient": ("weight_gradient", weight_gradient, (shape(H, I, dtype=jnp.float32), x, pre)),
}
EVERY = [(name, blocks) for name, (op, *_) in KERNELS.items() for blocks in CANDIDATES["pallas"][op]]


def allowed_under_way(wait: Any) -> int:
    return wait.params["n"] if "n" in wait.params else int(wait.invars[0].val)  # jax 0.10: an operand


class Walk:
    """Through a program in its order: products issued and not waited for, and what is released meanwhile."""

    def __init__(self) -> None:
        self.products = self.releases = self.under_way = 0
        self.too_early: list[str] = []

    def through(self, jaxpr: Any, *, issued_before: int = 0, of_last_step: bool = False) -> None:
        """of_last_step: what is released here are operands of the step before, whose products are older."""
        for equation in jaxpr.eqns:
            name, params = equation.primitive.name, equation.params
            if name == "wgmma_ref":
                self.products += 1
                self.under_way += 1
            elif name == "wgmma_wait":
                self.under_way = min(self.under_way, allowed_under_way(equation))
            elif name.startswith("wgmma_accumulator_deref"):
                self.under_way = min(self.under_way, params.get("wait_n", 0))
            elif name == "barrier_arrive":
                self.releases += 1
                allowed = self.products - issued_before if of_last_step else 0
                if self.under_way > allowed:
                    self.too_early.append(f"{self.under_way} products under way, {allowed} of them later ones")
            inner = [jaxpr for value in params.values() for jaxpr in jaxprs_in(value)]
            in_loop = name in ("scan", "while")
            for body in inner * (2 if in_loop else 1):  # the second time what the first one left is under way
                before = self.products if in_loop else issued_before
                self.through(body, issued_before=before, of_last_step=name == "cond" and self.products > before)


def walked(name: str, blocks: Blocks) -> Walk:
    _, fn, shapes = KERNELS[name]
    walk = Walk()
    walk.through(jax.make_jaxpr(partial(fn, blocks=blocks))(*shapes).jaxpr)
    assert walk.products
    assert walk.releases
    return walk


@pytest.mark.parametrize(("name", "blocks"), EVERY, ids=str)
def test_operands_are_released_when_their_products_are_made(name: str, blocks: Blocks) -> None:
    assert not walked(name, blocks).too_early


def asked_for(equation: Any) -> int:
    return equation.params["n"] if "n" in equation.params else int(equation.invars[0].val)  # as above


@pytest.mark.parametrize(("name", "blocks"), EVERY, ids=str)
def test_warpgroups_ask_for_no_more_registers_than_their_program_has(name: str, blocks: Blocks) -> None:
    """A program is launched with 65536 registers at the most, of each of its threads as many, a multiple of 8."""
    asked = {
        (equation.params["action"], asked_for(equation))
        for jaxpr in _all(jax.make_jaxpr(partial(KERNELS[name][1], blocks=blocks))(*KERNELS[name][2]).jaxpr)
        for equation in jaxpr.eqns
        if equation.primitive.name.startswith("set_max_registers")
    }
    of = dict(asked)
    assert len(asked) == len(of) == 2
    computing = blocks.warps // 4
    launched = 65536 // (128 * (computing + 1)) // 8 * 8 * (computing + 1)
    assert of["decrease"] + computing * of["increase"] <= launched


@pytest.mark.parametrize(("name", "written"), [("dgated", 2), ("weight_gradient", 1)])
def test_a_kernel_writes_over_arrays_that_are_made(name: str, written: int) -> None:
    """XLA fuses a slice that a kernel reads into the kernel; of one that it writes over the results are then never written."""
    jaxpr = jax.make_jaxpr(KERNELS[name][1])(*KERNELS[name][2]).jaxpr
    found = [(inner, eq) for inner in _all(jaxpr) for eq in inner.eqns if eq.primitive.name == "run_state"]
    assert found
    for inner, equation in found:
        made = {out: eq.primitive.name for eq in inner.eqns for out in eq.outvars}
        assert sum(made.get(a) == "optimization_barrier" for a in equation.invars) == written


WAIT = plgpu.wgmma_wait
DROPPED = {"all": lambda n: None, "in the loop": lambda n: WAIT(n) if n == 0 else None}
MUTANTS = [(name, False, "all") for name in ("glu_up", "gate_and_up", "glu_up_aux", "dgated", "linear", "dx")]
MUTANTS += [(name, True, dropped) for name in ("glu_up", "gate_and_up", "dgated") for dropped in DROPPED]


@pytest.mark.parametrize(("name", "turns", "dropped"), MUTANTS)
def test_a_dropped_wait_is_found(name: str, turns: bool, dropped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`weight_gradient` has none to drop: it reads its sum at every step."""
    blocks = next(b for b in CANDIDATES["pallas"][KERNELS[name][0]] if b.turns == turns)
    jax.clear_caches()  # the launches are jitted
    monkeypatch.setattr(plgpu, "wgmma_wait", DROPPED[dropped])
    try:
        assert walked(name, blocks).too_early
    finally:
        jax.clear_caches()


def test_a_product_is_not_waited_for_where_the_other_warpgroup_stands_by() -> None:
    """In turns the products of a step are still under way when the operands of the one before are released."""
    blocks = replace(CANDIDATES["pallas"]["dgated"][0], rows=64, turns=True)
    waits = {
        allowed_under_way(equation)
        for jaxpr in _all(jax.make_jaxpr(partial(KERNELS["dgated"][1], blocks=blocks))(*KERNELS["dgated"][2]).jaxpr)
        for equation in jaxpr.eqns
        if equation.primitive.name == "wgmma_wait"
    }
    assert waits == {0, 1}


def _all(jaxpr: Any) -> Any:
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for inner in jaxprs_in(value):
                yield from _all(inner)
