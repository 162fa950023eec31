"""A PyTorch module or a Hugging Face model, for `verify`: the same input through it tiled and untiled."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shared_specs.app.models.weights import model_folder
from shared_specs.app.options import InputError, VerifyOptions
from shared_specs.app.verify import Computed, made, named_object
from shared_specs.errors import UnsupportedError
from tiled_torch import tile, tile_model, tiling_paths
from tiled_torch.commands.bench.live_bytes import LiveBytes


class TorchSubject:
    """See `shared_specs.app.verify.Subject`. In evaluation mode: what dropout leaves out depends on how tokens are cut."""

    def __init__(self, options: VerifyOptions) -> None:
        if options.device == "gpu" and not torch.cuda.is_available():
            raise UnsupportedError("verify: --device must be cpu or auto here, got gpu. PyTorch sees no CUDA GPU.")
        self._device = torch.device("cpu" if options.device == "cpu" or not torch.cuda.is_available() else "cuda")
        torch.manual_seed(options.seed)
        self._options, self._of_tokens = options, options.model is not None
        self.name = options.model or str(options.target)
        self.dtypes: tuple[str, ...] = ("float32",) if self._of_tokens else ("float64", "float32")
        self._plain = self._loaded().to(self._device).eval()
        self._paths: dict[str, str] = {}
        self._whole = not self._of_tokens and not self._has_layers()

    def compute(self, dtype: str, tiled: bool) -> Computed:
        module = self._module(dtype, tiled)
        hooks = {name: 0 for name, parameter in module.named_parameters() if parameter.requires_grad}

        def count(name: str) -> Any:
            def fired(_: Tensor) -> None:
                hooks[name] += 1

            return fired

        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(count(name))
        x = self._input(dtype)
        y = self._run(module, x, tiled)
        if tiled and not self._whole:
            self._paths = tiling_paths(module)
        results = {"loss" if self._of_tokens else "y": y.detach(), "dx": x.grad}
        results |= {f"d{name}": parameter.grad for name, parameter in module.named_parameters()}
        found = {name: value.cpu().numpy() for name, value in results.items() if value is not None}
        return Computed(results=found, hooks=hooks)

    def paths(self) -> Mapping[str, str]:
        return {"": "tile: the whole of it is one token-wise function"} if self._whole else self._paths

    def peak_bytes(self, tiled: bool) -> int:
        module, x = self._module("float32", tiled), self._input("float32")
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self._run(module, x, tiled)
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - before
        with LiveBytes() as live:
            self._run(module, x, tiled)
        return live.peak

    def _run(self, module: nn.Module, x: Tensor, tiled: bool) -> Tensor:
        """Return the output or the loss, after backward."""
        if self._of_tokens:
            loss = module(input_ids=x, labels=x, use_cache=False).loss
            loss.backward()
            return loss
        call = tile(module, num_shards=self._options.num_shards) if tiled and self._whole else module
        y = call(x)
        y = y[0] if isinstance(y, tuple) else y
        if not isinstance(y, Tensor):
            raise InputError(
                f"verify: {self.name} must return a tensor, or a tuple that begins with one, got {type(y).__name__}."
            )
        random = torch.Generator().manual_seed(self._options.seed + 1)
        y.backward(torch.randn(y.shape, generator=random, dtype=torch.float64).to(y))
        return y

    def _module(self, dtype: str, tiled: bool) -> nn.Module:
        module = copy.deepcopy(self._plain).to(getattr(torch, dtype))
        if tiled and not self._whole:
            scope = self._options.scope
            tile_model(module, scope=scope, num_shards=self._options.num_shards)
        return module

    def _has_layers(self) -> bool:
        """Return whether `tile_model` knows an MLP inside; a module without one is tiled as it is."""
        try:
            tile_model(copy.deepcopy(self._plain), num_shards=self._options.num_shards)
        except UnsupportedError:
            return False
        return True

    def _input(self, dtype: str) -> Tensor:
        random = torch.Generator().manual_seed(self._options.seed)
        if self._of_tokens:
            size = self._plain.get_input_embeddings().num_embeddings  # type: ignore[operator]
            return torch.randint(size, (1, self._options.tokens), generator=random).to(self._device)
        shape = (1, self._options.tokens, self._options.hidden or 1)
        x = torch.randn(shape, generator=random, dtype=torch.float64)
        return x.to(self._device, getattr(torch, dtype)).requires_grad_()

    def _loaded(self) -> Any:
        options = self._options
        if options.model is not None:
            return _model(options.model)
        found = named_object(str(options.target))
        if not isinstance(found, nn.Module):
            if not callable(found):
                raise InputError(
                    f"verify: {options.target} must be a torch.nn.Module, or return one, got {type(found).__name__}."
                )
            found = made(str(options.target), found, options.hidden or 1)
        if not isinstance(found, nn.Module):
            raise InputError(f"verify: {options.target} must return a torch.nn.Module, got {type(found).__name__}.")
        return found


def _model(given: str) -> nn.Module:
    """Return a causal language model of transformers from a folder, float32, its attention in blocks."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    place = model_folder(given, "verify")
    where = {"gguf_file": place.name} if place.is_file() else {}
    try:
        return AutoModelForCausalLM.from_pretrained(
            place.parent if place.is_file() else place,
            local_files_only=True,
            dtype=torch.float32,
            attn_implementation="sdpa",
            **where,
        )
    except Exception as error:  # transformers says by all kinds of it what is wrong with a folder
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"verify: --model must be a causal language model, got {given} ({reason}).") from error
