"""A PyTorch module or a Hugging Face model, for `verify`: the same input through it tiled and untiled."""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shared_specs.app.models.weights import model_folder
from shared_specs.app.options import InputError, VerifyOptions
from shared_specs.app.verification.target import made, named_object
from shared_specs.app.verification.verify import Computed, check_subject
from shared_specs.check.compare import named_results
from shared_specs.errors import UnsupportedError
from tiled_torch import tile, tile_model, tiling_paths
from tiled_torch.check.live_bytes import peak_bytes


class TorchSubject:
    """See `shared_specs.app.verification.verify.Subject`. A module whose forward takes input_ids is a language model; where it
    takes labels too, they are these ids, and its loss is what goes backward.
    """

    def __init__(self, options: VerifyOptions) -> None:
        if options.device == "gpu" and not torch.cuda.is_available():
            raise UnsupportedError("verify: --device must be cpu or auto here, got gpu. PyTorch sees no CUDA GPU.")
        self._device = torch.device("cpu" if options.device == "cpu" or not torch.cuda.is_available() else "cuda")
        torch.manual_seed(options.seed)
        self._options = options
        self.name, self.modes = options.model or str(options.target), ("evaluation", "training")
        self._plain = self._loaded().to(self._device).eval()
        self._takes = inspect.signature(self._plain.forward).parameters
        self._of_tokens = "input_ids" in self._takes
        check_subject(options, self._of_tokens)
        # Layers of language models are written for float32 and less: norms of float64 are rounded to it.
        self.dtypes: tuple[str, ...] = ("float32",) if self._of_tokens else ("float64", "float32")
        self._paths: dict[str, str] = {}
        self._whole = not self._of_tokens and not self._has_layers()

    def compute(self, dtype: str, tiled: bool, mode: str = "evaluation", draw: int = 0) -> Computed:
        module = self._module(dtype, tiled).train(mode == "training")
        hooks = {name: 0 for name, parameter in module.named_parameters() if parameter.requires_grad}

        def count(name: str) -> Any:
            def fired(parameter: Tensor) -> None:  # also of one that no gradient has come to
                hooks[name] += parameter.grad is not None

            return fired

        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(count(name))
        x = self._input(dtype)
        torch.manual_seed(self._options.seed + draw)
        found = self._run(module, x, tiled)
        if tiled and not self._whole:
            self._paths = tiling_paths(module)
        results = {name: value.detach() for name, value in found.items()} | {"dx": x.grad}
        results |= {f"d{name}": parameter.grad for name, parameter in module.named_parameters()}
        arrays = {name: value.cpu().numpy() for name, value in results.items() if value is not None}
        return Computed(results=arrays, hooks=hooks)

    def paths(self) -> Mapping[str, str]:
        return {"": "tile: the whole of it is one token-wise function"} if self._whole else self._paths

    def peak_bytes(self, tiled: bool) -> int:
        module, x = self._module("float32", tiled), self._input("float32")
        return peak_bytes(lambda: self._run(module, x, tiled), self._device)

    def _run(self, module: nn.Module, x: Tensor, tiled: bool) -> dict[str, Tensor]:
        """Return everything floating that came out, after backward: of the loss alone where there is one."""
        call = tile(module, num_shards=self._options.num_shards) if tiled and self._whole else module
        y = call(**self._tokens(x)) if self._of_tokens else call(x)
        found = named_results(y, lambda a: isinstance(a, Tensor) and a.is_floating_point())
        if not found:
            raise InputError(f"verify: {self.name} must return a tensor of floating-point numbers, got {_kind(y)}.")
        loss = found.get("y.loss", found.get("y[0]", found.get("y")))
        if "labels" in self._takes and self._of_tokens and loss is not None and not loss.dim():
            loss.backward()
            return {"loss" if value is loss else name: value for name, value in found.items()}
        random = torch.Generator().manual_seed(self._options.seed + 1)
        upstream = {
            name: torch.randn(a.shape, generator=random, dtype=torch.float64).to(a) for name, a in found.items()
        }
        moved = [name for name, a in found.items() if a.requires_grad]
        torch.autograd.backward([found[name] for name in moved], [upstream[name] for name in moved])
        return found

    def _tokens(self, ids: Tensor) -> dict[str, Any]:
        """Return the arguments of a language model."""
        more = {"labels": ids, "use_cache": False}
        return {"input_ids": ids} | {name: value for name, value in more.items() if name in self._takes}

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
            return torch.randint(self._entries(), (1, self._options.tokens), generator=random).to(self._device)
        shape = (1, self._options.tokens, self._options.hidden or 1)
        x = torch.randn(shape, generator=random, dtype=torch.float64)
        return x.to(self._device, getattr(torch, dtype)).requires_grad_()

    def _entries(self) -> int:
        """Return how many entries the vocabulary of a language model has: those of its first embedding."""
        for module in self._plain.modules():
            if isinstance(module, nn.Embedding):
                return module.num_embeddings
        raise InputError(f"verify: {self.name} must have a torch.nn.Embedding for the input_ids that it takes.")

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
            found = made(str(options.target), found, options.hidden)
        if not isinstance(found, nn.Module):
            raise InputError(f"verify: {options.target} must return a torch.nn.Module, got {type(found).__name__}.")
        return found


def _kind(value: Any) -> str:
    return f"one of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


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
