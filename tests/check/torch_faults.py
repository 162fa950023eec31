"""Published silent faults, each as a way of training that looks right: what `check` must find, and the tensor it must name.

Where they come from stands in each one's docstring: issues of other projects, or a measurement of their code.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.check.faults import Faults
from tests.check.torch_models import MLP, LoRA, T, tiny, tokens

FAULTS = Faults()
fault = FAULTS.fault


def runs(module: Any, forward: Callable[..., Any]) -> None:
    """Give a module another forward."""
    module.forward = MethodType(forward, module)


class Recomputed(torch.autograd.Function):
    """fn(x, *parameters), whose backward computes it again: `again` where that is another function; shards one by one."""

    @staticmethod
    def forward(ctx: Any, fn: Any, again: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.again = again
        ctx.save_for_backward(x, *parameters)
        return fn(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.again(x)
        found = torch.autograd.grad(y, (x, *parameters), dy.to(y.dtype), allow_unused=True)
        return None, None, *found


def recomputes(mlp: nn.Module, again: Callable[[Tensor], Tensor]) -> None:
    kind = type(mlp).forward

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return Recomputed.apply(lambda x: kind(self, x), again, x, *self.parameters())

    runs(mlp, forward)


# Gradients that are lost.


@fault("gradient", "layers.1.mlp.router.weight", "there is none tiled")
def dropped_router_gradient() -> dict[str, Any]:
    """Axolotl D-AX4, Unsloth D-UN2: the router runs outside of what backward computes again."""

    def tile(model: Any) -> None:
        for layer in model.layers:
            runs(layer.mlp, lambda self, x: self.mixed(x, self.router(x).detach()))

    return dict(model=tiny(moe=True), batch=tokens(), tile=tile)


def adapted(model: Any) -> Any:
    torch.manual_seed(5)
    for layer in model.layers:
        layer.mlp.up = LoRA(layer.mlp.up)
    return model


@fault("forward", "layers.0.mlp")
def dropped_adapter() -> dict[str, Any]:
    """A fused MLP that takes `up.base.weight` and leaves the adapter out."""

    def tile(model: Any) -> None:
        for layer in model.layers:
            runs(layer.mlp, lambda self, x: self.down(F.silu(self.gate(x)) * self.up.base(x)))

    return dict(model=adapted(tiny()), batch=tokens(), tile=tile)


@fault("gradient", "layers.1.mlp.up.lora_b", "there is none tiled")
def adapter_without_gradient() -> dict[str, Any]:
    """unsloth-zoo#606: the adapter is merged into the weight, and nothing flows back to it."""

    def tile(model: Any) -> None:
        def merged(self: Any, x: Tensor) -> Tensor:
            up = self.up
            weight = (up.base.weight + up.lora_b @ up.lora_a).detach()
            return self.down(F.silu(self.gate(x)) * F.linear(x, weight, up.base.bias))

        for layer in model.layers:
            runs(layer.mlp, merged)

    return dict(model=adapted(tiny()), batch=tokens(), tile=tile)


class WithoutBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.flatten(0, -2).T @ x.flatten(0, -2), None


@fault("gradient", "layers.1.mlp.down.bias", "there is none tiled")
def forgotten_bias_gradient() -> dict[str, Any]:
    """transformers' kernels D-HF2: a parameter that is not among compute_params gets none."""

    def tile(model: Any) -> None:
        runs(model.layers[1].mlp.down, lambda self, x: WithoutBias.apply(x, self.weight, self.bias))

    return dict(model=tiny(), batch=tokens(), tile=tile)


@fault("gradient", "layers.1.mlp_norm.weight", "there is none tiled")
def gradient_of_x_lost() -> dict[str, Any]:
    """Liger D-LG1: the copy that makes x contiguous is made without gradients."""

    def tile(model: Any) -> None:
        mlp = model.layers[1].mlp
        runs(mlp, lambda self, x: MLP.forward(self, x.detach()))

    return dict(model=tiny(), batch=tokens(), tile=tile)


@fault("gradient", "layers.0.mlp.down.bias", "there is none tiled")
def frozen_x_takes_weights_along() -> dict[str, Any]:
    """Liger D-LG3: backward is skipped where x needs no gradient."""
    model = tiny()
    model.embed.requires_grad_(False)
    model.layers[0].attention.requires_grad_(False)
    model.layers[0].attention_norm.requires_grad_(False)
    model.layers[0].mlp_norm.requires_grad_(False)

    def tile(model: Any) -> None:
        runs(
            model.layers[0].mlp,
            lambda self, x: MLP.forward(self, x) if x.requires_grad else MLP.forward(self, x).detach(),
        )

    return dict(model=model, batch=tokens(), tile=tile)


@fault("gradient", "embed.weight")
def tied_weight_with_half_its_gradient() -> dict[str, Any]:
    """The head is gathered as a copy, whose gradient goes nowhere."""

    def tile(model: Any) -> None:
        runs(model.head, lambda self, x: F.linear(x, self.weight.detach()))

    return dict(model=tiny(tied=True), batch=tokens(), tile=tile)


# Gradients that are wrong.


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


@fault("gradient", "head.weight", "error 3.1e+01")
def head_gradient_32_fold() -> dict[str, Any]:
    """DeepSpeed D-DS2: the gradient that comes from above scales x's, and not the weight's."""

    def tile(model: Any) -> None:
        runs(model.head, lambda self, x: F.linear(x, Scaled.apply(self.weight, 32.0)))

    return dict(model=tiny(), batch=tokens(), tile=tile)


@fault("gradient", "layers.1.mlp.down.bias")
def last_shard_dropped() -> dict[str, Any]:
    """DeepSpeed D-DS1: torch.chunk returns fewer shards than were asked for, and the last ones are never added."""

    def tile(model: Any) -> None:
        mlp = model.layers[1].mlp

        def again(x: Tensor) -> Tensor:
            y = MLP.forward(mlp, x)
            return torch.cat([y[:, :12], y[:, 12:].detach()], 1)

        recomputes(mlp, again)

    return dict(model=tiny(), batch=tokens(), tile=tile)


class Misplaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return torch.cat([part.flatten(0, 1) for part in dy.chunk(4, 1)]).view_as(dy)


@fault("gradient", "layers.1.mlp.down.weight")
def shards_of_dim_1_in_a_flat_buffer() -> dict[str, Any]:
    """Axolotl D-AX1, DeepSpeed#7412: right for one sequence, and not for two."""

    def tile(model: Any) -> None:
        runs(model.layers[1].mlp, lambda self, x: Misplaced.apply(MLP.forward(self, x)))

    return dict(model=tiny(), batch=tokens(), tile=tile)


@fault("gradient", "layers.0.mlp.up.weight")
def stale_offloaded_buffer() -> dict[str, Any]:
    """Megatron#7398: a layer's input is copied back before its own copy is there: that of the other layer stands in it."""

    def tile(model: Any) -> None:
        buffer: dict[str, Tensor] = {}

        def offloads(mlp: Any) -> None:
            def forward(self: Any, x: Tensor) -> Tensor:
                buffer["x"] = x.detach().clone()
                with torch.autograd.graph.saved_tensors_hooks(
                    lambda a: (a.numel() == x.numel(), a),
                    lambda kept: buffer["x"].view_as(kept[1]) if kept[0] else kept[1],
                ):
                    return MLP.forward(self, x)

            runs(mlp, forward)

        for layer in model.layers:
            offloads(layer.mlp)

    return dict(model=tiny(), batch=tokens(), tile=tile)


@fault("gradient", "layers.1.mlp.down.weight")
def dropout_drawn_anew_in_recomputation() -> dict[str, Any]:
    """The random state of forward is not brought back."""

    def drops(self: Any, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.silu(self.gate(x)), 0.5) * self.up(x))

    def plain(model: Any) -> None:
        for layer in model.layers:
            runs(layer.mlp, drops)

    def tile(model: Any) -> None:
        for layer in model.layers:
            mlp = layer.mlp

            def forward(self: Any, x: Tensor) -> Tensor:
                run = lambda x: drops(self, x)  # noqa: E731
                return Recomputed.apply(run, run, x, *self.parameters())

            runs(mlp, forward)

    return dict(model=tiny(), batch=tokens(), plain=plain, tile=tile)


@fault("gradient", "layers.1.mlp.down.bias")
def autocast_of_backward_in_recomputation() -> dict[str, Any]:
    """Liger D-LG4 the other way: what is computed again is so in the dtypes of backward's place, not of forward's."""

    def tile(model: Any) -> None:
        for layer in model.layers:
            mlp = layer.mlp

            def again(x: Tensor, mlp: Any = mlp) -> Tensor:
                with torch.autocast("cpu", torch.bfloat16):
                    return MLP.forward(mlp, x)

            recomputes(mlp, again)

    return dict(model=tiny(), batch=tokens(), tile=tile)


class SummedIn16Bits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dw = torch.zeros_like(weight)
        for a, b in zip(dy.flatten(0, 1), x.flatten(0, 1), strict=True):
            dw += torch.outer(a, b)
        return dy @ weight, dw


@fault("gradient", "weight")
def weight_gradient_summed_in_bfloat16() -> dict[str, Any]:
    """torch_peers 5.5: ten times the error at 256 shards, and no single number that is wrong."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    x = torch.randn(1, 256, 8, generator=torch.Generator().manual_seed(1)).abs().to(torch.bfloat16)

    def tile(model: Any) -> None:
        runs(model, lambda self, x: SummedIn16Bits.apply(x, self.weight))

    def step(model: Any, x: Tensor) -> Tensor:
        return model(x).float().mean()

    return dict(model=model, batch=x, tile=tile, step=step)


def halving(model: Any) -> Any:
    model.layers[0].mlp.down.weight.register_hook(lambda gradient: 0.5 * gradient)
    return model


class EachShard(torch.autograd.Function):
    """Backward of one shard after the other, each of which adds to `.grad`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Any) -> Tensor:
        ctx.run, ctx.x = run, x.detach()
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        found = []
        for x, part in zip(ctx.x.chunk(4, 1), dy.chunk(4, 1), strict=True):
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                ctx.run(x).backward(part)
            found.append(x.grad)
        return torch.cat(found, 1), None


@fault("hook", "layers.0.mlp.gate.weight", "ran 4 times, 1 untiled")
def hook_run_once_a_shard() -> dict[str, Any]:
    """DeepSpeed, Liger, Axolotl, verl: backward runs `torch.autograd.backward` shard by shard."""

    def tile(model: Any) -> None:
        runs(model.layers[0].mlp, lambda self, x: EachShard.apply(x, lambda x: MLP.forward(self, x)))

    return dict(model=tiny(), batch=tokens(), tile=tile)


@fault("gradient", "layers.0.mlp.down.weight", "error 5.0e-01")
def hook_run_on_the_sum_again() -> dict[str, Any]:
    """transformers' kernels D-HF2: a hook that halves a gradient ends at a quarter."""

    def tile(model: Any) -> None:
        runs(model.layers[0].mlp.down, lambda self, x: F.linear(x, Scaled.apply(self.weight, 0.5), self.bias))

    return dict(model=lambda: halving(tiny()), batch=tokens(), tile=tile)


@fault("hook", "layers.0.mlp.down, heard", "ran 4 times, 1 untiled")
def module_hook_run_once_a_shard() -> dict[str, Any]:
    """What counts tokens or collects activations hears each shard."""

    def heard(module: Any, given: Any, result: Any) -> None: ...

    def tile(model: Any) -> None:
        runs(model.layers[0].mlp, lambda self, x: torch.cat([MLP.forward(self, part) for part in x.chunk(4, 1)], 1))

    model = tiny()
    model.layers[0].mlp.down.register_forward_hook(heard)
    return dict(model=model, batch=tokens(), tile=tile)


@fault("buffer", "layers.1.mlp.calls", "4, 1 untiled")
def buffer_updated_once_a_shard() -> dict[str, Any]:
    """A statistic that a module keeps moves with every shard."""

    def counted(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        return MLP.forward(self, x)

    def plain(model: Any) -> None:
        runs(model.layers[1].mlp, counted)

    def tile(model: Any) -> None:
        runs(model.layers[1].mlp, lambda self, x: torch.cat([counted(self, part) for part in x.chunk(4, 1)], 1))

    model = tiny()
    model.layers[1].mlp.register_buffer("calls", torch.tensor(0))
    return dict(model=model, batch=tokens(), plain=plain, tile=tile)


# Another model, and the same shapes.


@fault("forward", "layers.0.mlp")
def wrong_activation() -> dict[str, Any]:
    """A fused kernel has one formula of gelu, the model the other."""

    def runs_with(**options: str) -> Callable[[Any], None]:
        def change(model: Any) -> None:
            for layer in model.layers:
                runs(layer.mlp, lambda self, x: self.down(F.gelu(self.gate(x), **options) * self.up(x)))

        return change

    return dict(model=tiny(), batch=tokens(), plain=runs_with(), tile=runs_with(approximate="tanh"))


@fault("loss", "loss")
def ignored_softcap() -> dict[str, Any]:
    """A loss kernel without the cap of Gemma's logits."""

    def tile(model: Any) -> None:
        model.cap = 0.0

    return dict(model=tiny(cap=1.0), batch=tokens(), tile=tile)


DOCUMENTS = (torch.arange(T) // 6).expand(2, T)


@fault("forward", "layers.0.attention")
def packing_leaks() -> dict[str, Any]:
    """trl#6843, axolotl#3608: documents in one row see each other."""

    def tile(model: Any) -> None:
        for layer in model.layers:
            kind = type(layer.attention).forward
            runs(layer.attention, lambda self, x, kind=kind, **where: kind(self, x))

    return dict(model=tiny(), batch=tokens(document=DOCUMENTS), tile=tile)


@fault("forward", "layers.0.attention")
def padding_is_seen() -> dict[str, Any]:
    """A mask that a tiled layer does not hand on."""

    def tile(model: Any) -> None:
        for layer in model.layers:
            kind = type(layer.attention).forward
            runs(layer.attention, lambda self, x, kind=kind, **where: kind(self, x, **where | {"padding": None}))

    padding = torch.arange(T).expand(2, T) >= torch.tensor([[3], [0]])
    return dict(model=tiny(), batch=tokens(padding=padding), tile=tile)


@fault("forward", "layers.0.attention")
def context_axis_is_off() -> dict[str, Any]:
    """Megatron-Bridge#2667: each rank of a context attends to its own part alone."""

    def tile(model: Any) -> None:
        for layer in model.layers:
            layer.attention.windows = 2

    return dict(model=tiny(), batch=tokens(), tile=tile)


@fault("loss", "loss")
def labels_shifted_twice() -> dict[str, Any]:
    """By the collator and by the model."""

    def tile(model: Any) -> None:
        kind = type(model).loss
        model.loss = MethodType(lambda self, x, labels: kind(self, x, labels.roll(-1, 1)), model)

    return dict(model=tiny(), batch=tokens(), tile=tile)


IGNORED = torch.where(torch.arange(T) % 3 == 0, -100, tokens()["ids"])


@fault("loss", "loss")
def ignored_labels_counted_in_the_mean() -> dict[str, Any]:
    """The sum is divided by all tokens."""

    def loss(self: Any, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(x[:, :-1]).flatten(0, 1)
        return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / labels[:, 1:].numel()

    def tile(model: Any) -> None:
        model.loss = MethodType(loss, model)

    return dict(model=tiny(), batch=tokens(labels=IGNORED), tile=tile)


@fault("loss", "loss")
def mean_of_the_means_of_shards() -> dict[str, Any]:
    """DeepSpeed D-DS2: shards with fewer labels count as much as the others."""

    def loss(self: Any, x: Tensor, labels: Tensor) -> Tensor:
        parts = zip(self.logits(x[:, :-1]).split(5, 1), labels[:, 1:].split(5, 1), strict=True)
        return torch.stack([F.cross_entropy(a.flatten(0, 1), b.flatten()) for a, b in parts]).mean()

    def tile(model: Any) -> None:
        model.loss = MethodType(loss, model)

    batch = tokens(
        labels=torch.where(torch.arange(T) < 9, -100, tokens()["ids"]).index_fill(1, torch.tensor([2, 7]), 3)
    )
    return dict(model=tiny(), batch=batch, tile=tile)


# The way of training.


def whole(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss = model(**batch)
    loss.backward()
    return loss.detach()


def halves_of(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: value.chunk(2)[number] for name, value in batch.items()} for number in range(2)]


def as_it_is(model: Any) -> None: ...


@fault("loss", "loss")
def batch_cut_twice() -> dict[str, Any]:
    """axolotl#3498: the sampler gives a rank its part, and the trainer cuts it again."""

    def step(model: Any, batch: dict[str, Tensor]) -> Tensor:
        losses = [model(**halves_of(half)[0]) for half in halves_of(batch)]  # two ranks
        loss = torch.stack(losses).mean()
        loss.backward()
        return loss.detach()

    return dict(model=tiny(), batch=tokens(4), tile=as_it_is, step=step, plain_step=whole)


@fault("gradient", "head.weight", "error 5.0e-01")
def accumulation_divides_twice() -> dict[str, Any]:
    """The loss is a mean over micro-batches, and the engine divides by their number too."""

    def step(model: Any, batch: dict[str, Tensor]) -> Tensor:
        losses = [model(**half) for half in halves_of(batch)]
        for loss in losses:
            (loss / 2 / 2).backward()
        return torch.stack(losses).mean().detach()

    return dict(model=tiny(), batch=tokens(4), tile=as_it_is, step=step, plain_step=whole)


@fault("gradient", "head.weight")
def earlier_micro_batches_lost() -> dict[str, Any]:
    """verl D-VE2, Liger#1125: a gradient is written where it should be added."""

    def step(model: Any, batch: dict[str, Tensor]) -> Tensor:
        losses = [model(**half) for half in halves_of(batch)]
        for loss in losses:
            model.zero_grad()
            (loss / 2).backward()
        return torch.stack(losses).mean().detach()

    return dict(model=tiny(), batch=tokens(4), tile=as_it_is, step=step, plain_step=whole)


@fault("parameter", "norm.weight")
def parameter_left_out_of_the_optimizer() -> dict[str, Any]:
    """Its gradient is right, and nothing moves it."""

    def tile(model: Any) -> None:
        model.norm.weight.left_out = True

    def optimizer(parameters: Any) -> Any:
        return torch.optim.SGD([p for p in parameters if not hasattr(p, "left_out")], 0.1)

    return dict(model=tiny(), batch=tokens(), tile=tile, optimizer=optimizer)
