"""A stack of decoder layers by every scope of `tile_model`, forward and backward, for `bench --device gpu`."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shared_specs.app.gpu.layer_bytes import eager_layers_bytes
from shared_specs.app.gpu.worker import Variant
from shared_specs.app.plan.decoder import Decoder
from shared_specs.app.plan.search import step_flop, step_seconds
from shared_specs.app.plan.setting import Setting
from shared_specs.config import Tiling
from shared_specs.kernels.roofline import GPU
from tiled_torch import tile_model
from tiled_torch.commands.gpu.kernels import draw

LAYER_GROUPS = ("main", "long")
Scope = Literal["mlp", "block"]


class Stacks:
    """The variants of a few layers of one model, without embedding and head: x and dy are [1, T, H]."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        tokens: int,
        shard: int,
        dtype: torch.dtype,
        device: torch.device,
        gpu: GPU | None = None,
    ) -> None:
        self.decoder, self.tokens, self.shard, self.dtype, self.gpu = decoder, tokens, shard, dtype, gpu
        self.x = draw(1, tokens, decoder.hidden, like=dtype, device=device).requires_grad_()
        self.dy = draw(1, tokens, decoder.hidden, like=dtype, device=device)
        config: Any = transformers.Qwen3Config(
            hidden_size=decoder.hidden,
            intermediate_size=decoder.intermediate,
            num_hidden_layers=decoder.layers,
            num_attention_heads=decoder.heads,
            num_key_value_heads=decoder.kv_heads,
            head_dim=decoder.head_dim,
            vocab_size=8,
        )
        torch.manual_seed(0)
        with torch.device(device):
            model: Any = transformers.Qwen3ForCausalLM(config)
            self.model: Any = model.to(dtype).train()
            positions = torch.arange(tokens)[None]
        self.plain = list(self.model.model.layers)
        self.rotary = self.model.model.rotary_emb(self.x.detach(), positions)
        # One set of weights: every scope tiles modules of its own over the same parameters.
        self.tiled = {scope: self._tiled(config, scope) for scope in ("mlp", "block")}

    def _tiled(self, config: Any, scope: Scope) -> list[Any]:
        with torch.device("meta"):
            model: Any = transformers.Qwen3ForCausalLM(config).train()
        for ours, theirs in zip(model.model.layers, self.plain, strict=True):
            for name, parameter in theirs.named_parameters():
                owner, _, kind = name.rpartition(".")
                setattr(ours.get_submodule(owner), kind, parameter)
        tile_model(model, scope=scope, tiling=Tiling(shard_tokens=self.shard))
        return list(model.model.layers)

    def forward(self, layers: list[Any], x: Tensor, *, own: bool, offload: bool = False) -> Tensor:
        """own: layers that keep their input alone by themselves."""
        for layer in layers:
            layer._offload = offload
            run: Callable[..., Any] = partial(layer, position_embeddings=self.rotary, attention_mask=None)
            y = run(x) if own else checkpoint(run, x, use_reentrant=False)
            x = y[0] if isinstance(y, tuple) else y
        return x

    def step(self, layers: list[Any], *, library: bool = False, predicted: int | None = None, **how: bool) -> Variant:
        """Forward and backward; gradients of x and of the first and the last layer's weights are compared."""
        x, dy, parameters = self.x, self.dy, [p for layer in self.plain for p in layer.parameters()]
        compared = {
            f"d{place}_{name}": p
            for place, layer in (("first", self.plain[0]), ("last", self.plain[-1]))
            for name, p in layer.named_parameters()
            if name.endswith("proj.weight")
        }

        def clear() -> None:
            x.grad = None
            for p in parameters:
                p.grad = None

        def run() -> None:
            self.forward(layers, x, **how).backward(dy)
            clear()

        def results() -> dict[str, Tensor]:
            clear()
            y = self.forward(layers, x, **how)
            y.backward(dy)
            grads = {"dx": x.grad} | {name: p.grad for name, p in compared.items()}
            clear()
            missing = [name for name, a in grads.items() if a is None]
            if missing:
                raise RuntimeError(f"no {', '.join(missing)}")
            return {"y": y.detach()} | {name: a for name, a in grads.items() if a is not None}

        setting = Setting(tokens=self.tokens, scope="block", shard_tokens=self.shard)
        flop = sum(step_flop(self.decoder, setting)) - 6 * self.decoder.hidden * self.decoder.vocab * self.tokens
        seconds = None if self.gpu is None else step_seconds(self.decoder, setting, self.gpu)
        facts: dict[str, Any] = {
            "library": library,
            "flop": flop,
            "model_seconds": seconds,
            "predicted_bytes": predicted,
        }
        return Variant(run=run, results=results, chain=self.decoder.layers, **facts)

    def predicted(self, *, offload: bool) -> int:
        """Return the peak beyond x, dy and the weights, as the formulas of scope="block" say it."""
        return eager_layers_bytes(self.decoder, self.tokens, self.shard, self.dtype.itemsize, offload=offload)

    def main(self) -> dict[str, Variant]:
        tiled = self.tiled
        return {
            "checkpoint": self.step(self.plain, own=False, library=True),
            "mlp": self.step(tiled["mlp"], own=False),
            "block": self.step(tiled["block"], own=True, predicted=self.predicted(offload=False)),
            "block-offload": self.step(tiled["block"], own=True, offload=True, predicted=self.predicted(offload=True)),
        }

    def long(self) -> dict[str, Variant]:
        """As main, but for what a long context has no time for."""
        return {name: variant for name, variant in self.main().items() if name != "mlp"}


def layer_groups(**sizes: Any) -> dict[str, Callable[[], dict[str, Variant]]]:
    """As `mlp_groups`."""
    return {name: lambda name=name: getattr(Stacks(**sizes), name)() for name in LAYER_GROUPS}
