"""One step of a plan under fake tensors and a fake process group, its bytes as PyTorch's own memory tracker counts them."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.mod_tracker import ModTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import _sharding_prop
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from shared_specs.app.models.decoders import DECODERS
from shared_specs.app.plan.decoder import Decoder
from shared_specs.app.plan.simulated import Simulated, Simulator
from shared_specs.app.plan.step import Setting
from shared_specs.config import Tiling
from tiled_torch.commands.plan.device import NAME, simulated_ranks
from tiled_torch.models import tile_model
from tiled_torch.models.block.host_memory import host_memory
from tiled_torch.models.block.parts import Unhooked
from tiled_torch.plans.api import parallelize
from tiled_torch.plans.registry import plan_of
from tiled_torch.tile.call import TiledCall

_COLLECTIVES = ("c10d", "_c10d_functional")


def simulate(decoder: Decoder, setting: Setting) -> Simulated:
    """Return the bytes of forward and backward of one rank, the optimizer's aside. The decoder's layers are all run."""
    return simulate_model(lambda: _untiled(decoder, setting), setting)


def simulate_model(build: Callable[[], nn.Module], setting: Setting) -> Simulated:
    """Return the same of a model that `build` makes, untiled, under fake tensors.

    On a GPU what a kernel of this library would hold in registers is counted as PyTorch's operators would hold it; attention
    is FlashAttention's: its output and a log-sum-exp of every head. Masks are those that a model makes of one document.
    """
    place = NAME if setting.device == "gpu" else "cpu"
    host_memory.cache_clear()  # buffers of another simulation would be used again and not be counted
    with warnings.catch_warnings(), simulated_ranks(setting.gpus, _rank(setting)):
        warnings.simplefilter("ignore")  # of fully_shard on fake tensors
        mesh = _mesh(setting, place)
        with FakeTensorMode(allow_non_fake_inputs=True), ExitStack() as stack:
            model = build()
            stack.enter_context(_usual_masks())
            # DTensor makes whole tensors to see what a result is like. In a mode of their own they are not counted.
            stack.enter_context(patch.object(_sharding_prop, "detect_fake_mode", lambda *_: None))
            config = setting.config
            if plan_of(model).no_layers is not None:
                config = replace(config, checkpointing=None)
            model = parallelize(_tiled(model, setting, place).train(), mesh, config)
            ids = torch.zeros(setting.sequences, setting.tokens, dtype=torch.long, device=place)
            moments, collectives = _Moments(place), _Collectives()
            moments.follow(model, ids)
            # Not in a thread of autograd, which would run into the end of the interpreter.
            with (
                moments.modules.unseen(),
                moments.tracker,
                collectives,
                torch.autograd.set_multithreading_enabled(False),
            ):
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    moments.end("backward of the first layer")
    return Simulated(moments=moments.found, host=moments.host, collectives=dict(collectives.counts))


class _Modules(ModTracker):
    """Knows nothing of modules that stand for another one's forward: it would take that one for theirs.

    Nor does it know of modules that `tile` tries on a few tokens: their hooks would keep all tokens, of which these are a part,
    to the end of the step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trying = False

    def _fw_pre_hook(self, mod: nn.Module, input: Any) -> None:
        if not (self.trying or isinstance(mod, Unhooked)):
            super()._fw_pre_hook(mod, input)

    def _fw_post_hook(self, mod: nn.Module, input: Any, output: Any) -> None:
        if not (self.trying or isinstance(mod, Unhooked)):
            super()._fw_post_hook(mod, input, output)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Let what `tile` tries go unseen inside."""
        probe = TiledCall.probe

        def tried(call: TiledCall, flat: Any) -> Any:
            before, self.trying = self.trying, True
            try:
                return probe(call, flat)
            finally:
                self.trying = before

        with patch.object(TiledCall, "probe", tried):
            yield


class _Moments:
    """The peaks of parts of a step, each of which grows with depth in its own way: one of another part is no guide to it.

    Attributes:
        found: part -> kind -> bytes on the device. host: bytes elsewhere at their peak.
    """

    def __init__(self, place: str) -> None:
        self.place, self.tracker = place, MemTracker()
        self.modules = self.tracker._mod_tracker = _Modules()
        self.found: dict[str, dict[str, int]] = {}
        self.host = 0

    def follow(self, model: Any, ids: torch.Tensor) -> None:
        """Begins. Parts end where the loss is there and where a gradient comes to a layer."""
        self.tracker.track_external(model, ids)
        (*_, layers) = plan_of(model).lists_of(model)
        for number, layer in enumerate(layers):
            behind = len(layers) - number
            names = ["backward of the loss" if behind == 1 else f"backward of layer {behind - 1} from the end"]
            if number == 0 and behind > 2:  # of three layers one is both, so that a line through two depths has either
                names = ["backward of the second layer", *names][: 2 if behind == 3 else 1]
            layer.register_forward_hook(partial(self._end_with_gradient, names))
        model.register_forward_hook(lambda *_: self.end("forward and loss"))

    def end(self, *parts: str) -> None:
        """Note that a part has ended, by its names."""
        for device, kinds in self.tracker.get_tracker_snapshot("peak").items():
            named = {str(getattr(kind, "value", kind)).lower(): size for kind, size in kinds.items()}
            total = named.pop("total")
            if device.type == self.place:
                self.found |= {part: {name: size for name, size in named.items() if size} for part in parts}
            else:
                self.host = max(self.host, total)
        self.tracker._peak_mem.clear()
        self.tracker._peak_mem_snap.clear()

    def _end_with_gradient(self, parts: list[str], _: Any, __: Any, y: Any) -> None:
        y = y if isinstance(y, torch.Tensor) else y[0]
        if y.requires_grad:
            y.register_hook(lambda _: self.end(*parts))


def _rank(setting: Setting) -> int:
    """Whose bytes are counted: of a ring the last, whose queries are all at work in every step."""
    return setting.gpus - 1 if setting.ring > 1 else 0


def _mesh(setting: Setting, place: str) -> Any:
    sizes = setting.axes
    shards = [name for name in sizes if name != "tp"]
    mesh = init_device_mesh(place, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if len(shards) > 1:  # not under fake tensors, which have no coordinates
        mesh[tuple(shards)]._flatten("_".join(shards))
    return mesh


def _untiled(decoder: Decoder, setting: Setting) -> nn.Module:
    """Return Hugging Face's model of these sizes."""
    windows = {} if decoder.window is None else {"sliding_window": decoder.window}
    terms, inside = DECODERS[decoder.kind].experts, "intermediate_size"
    experts = {}
    if terms is not None:
        experts, inside = {terms.count: decoder.experts, terms.chosen: decoder.chosen}, terms.intermediate
    config = transformers.AutoConfig.for_model(
        decoder.kind,
        **windows,
        hidden_size=decoder.hidden,
        **experts,
        **{inside: decoder.intermediate},
        num_hidden_layers=decoder.layers,
        num_attention_heads=decoder.heads,
        num_key_value_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        vocab_size=decoder.vocab,
        tie_word_embeddings=decoder.tied,
        max_position_embeddings=setting.tokens,
        pad_token_id=None,  # of phi3 beyond a small vocabulary
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def _tiled(model: Any, setting: Setting, place: str) -> nn.Module:
    """Return a model on the device, tiled as the setting says."""
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for module in model.modules():  # whose tensors may not be moved: a fake one's kind of device stays
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, device=place)
                module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=place)
    if tied:
        model.tie_weights()
    if setting.scope != "none":
        tile_model(model, scope=setting.scope, tiling=Tiling(shard_tokens=setting.shard_tokens))
    return model


@contextmanager
def _usual_masks() -> Iterator[None]:
    """Let transformers make the masks that it makes of tensors with values: those of one document, not those of tracing."""
    with (
        patch.object(masking_utils, "is_tracing", lambda *_: False),
        patch.object(masking_utils, "find_packed_sequence_indices", lambda *_, **__: None),
    ):
        yield


class _Collectives(TorchDispatchMode):
    """Counts calls of every collective."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COLLECTIVES:
            self.counts[func.__name__.split(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def setting_simulated(setting: Setting) -> Setting:
    """Return what is run in a setting's place: kernels need a GPU."""
    return replace(setting, kernels=False)


SIMULATOR = Simulator(simulate, setting_simulated)
