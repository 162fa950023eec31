"""The sizes of a decoder: by the name of a published model, or from its config.json."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

from shared_specs.app.models.decoders import DECODERS, biases, layer_windows
from shared_specs.app.options import InputError
from shared_specs.app.plan.held import Held
from shared_specs.app.plan.setting import Scope, Setting
from shared_specs.config import Half

MASTER = 4  # bytes of a parameter, of its gradient and of each moment, but of those of a model object


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Sizes of a decoder with grouped heads and a gated MLP, as the formulas read them.

    Attributes:
        value_dim: of a head of values where it is another than of queries and keys.
        tied: whether the head is the embedding. kind: the model_type, one of `DECODERS`, with what it has beside Llama.
        attention_bias, mlp_bias: of all projections of attention, and of the MLP.
        experts, chosen: of an MLP that is several experts, and of these how many a token has; `intermediate` is of one. 0, 0:
            it is one MLP.
        shared: `intermediate` of the MLP beside experts that all tokens have; 0: there is none. shared_is_read: whether its
            result is multiplied, by a gate, before it is added to theirs.
        matrices: of an MLP: gate, up and down, or without a gate two. bent: without a gate, arrays that its activation makes in
            backward beside its input and that one's gradient, where it is several operators.
        fused: whether gate and up are one matrix; of a `kind` among `DECODERS` that says it.
        normed: whether norms are behind attention and the MLP; of a `kind` among `DECODERS` that says it.
        wide_positions: whether cosine and sine of the positions are float32 in any dtype.
        caps: the terms of a config that say below what scores of attention, or logits, stay; of a half that has formulas of
            them.
        window: tokens that a query sees in `windowed` of the layers; None where it sees all before in every one.
        by_structure: the sizes are those of a model object's layers; what `kind` says of `DECODERS` does not hold.
        measured: returns the bytes of one layer's backward without layers' inputs; None where formulas do. scope: of
            `tile_model` with which it was measured. lists: where its layers are. kept: inputs that the layers keep where some
            are called several times. between: features of a token between layers where they are others than the head's, such
            as those of several streams. beside: parameters besides layers, embedding, head and final norm; less than 0 where
            the embedding is smaller than the head.
        whole: returns the bytes of one device in forward and backward, of a model that is measured as one program and has no
            other sizes than those of its parameters; None of every other one. recomputed: whether `parallelize` recomputes its
            layers; not where it knows none.
        positions: tokens that a sequence may have at most; None: any number.
        held: the parameters that a model object has; None: all are trained and in float32.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    value_dim: int | None = None
    tied: bool = False
    kind: str = "llama"
    attention_bias: bool = False
    mlp_bias: bool = False
    experts: int = 0
    chosen: int = 0
    shared: int = 0
    shared_is_read: bool = False
    matrices: int = 3
    bent: int = 0
    fused: bool = False
    normed: bool = False
    wide_positions: bool = False
    caps: tuple[str, ...] = ()
    window: int | None = None
    windowed: int = 0
    by_structure: bool = False
    measured: Callable[[Setting], int] | None = None
    scope: Scope = "block"
    lists: tuple[str, ...] = ()
    kept: int | None = None
    between: int | None = None
    beside: int = 0
    whole: Callable[[Setting], int] | None = None
    recomputed: bool = True
    positions: int | None = None
    held: Held | None = None

    @property
    def has_formulas(self) -> bool:
        """Return whether formulas know all of a step."""
        return self.measured is None and self.whole is None

    @property
    def inputs(self) -> int:
        """Inputs that the layers keep."""
        return self.kept or self.layers

    @property
    def stream(self) -> int:
        """Features of a token between layers."""
        return self.between or self.hidden

    @property
    def queries(self) -> int:
        """Columns of all query heads."""
        return self.heads * self.head_dim

    @property
    def attended(self) -> int:
        """Return the mean of the columns of all query heads and of what they attend to."""
        return self.heads * (self.head_dim + (self.value_dim or self.head_dim)) // 2

    @property
    def keys(self) -> int:
        """Columns of all key heads."""
        return self.kv_heads * self.head_dim

    @property
    def router(self) -> int:
        """Return the parameters of what chooses experts."""
        return self.hidden * self.experts

    @property
    def mlp_weights(self) -> int:
        """Return the parameters of one MLP, or of all experts of a layer, that are factors of products."""
        return self.matrices * self.hidden * self.intermediate * max(1, self.experts)

    @property
    def shared_weights(self) -> int:
        """Return the parameters of the MLP beside experts."""
        return 3 * self.hidden * self.shared

    @property
    def layer_products(self) -> int:
        """Return the parameters of one layer that are factors of products of a token."""
        if self.by_structure:
            unchosen = max(0, self.experts - self.chosen) * self.matrices * self.hidden * self.intermediate
            return self.layer_parameters - unchosen
        of_mlps = 3 * self.intermediate * max(1, self.chosen)
        return self.hidden * (2 * self.queries + 2 * self.keys + of_mlps) + self.router

    @property
    def layer_parameters(self) -> int:
        """Return parameters of one layer: of layers that differ, of the one with most."""
        if self.by_structure and self.held is not None:
            return self.held.layer
        kind = DECODERS[self.kind]
        weights = self.hidden * (2 * self.queries + 2 * self.keys) + self.mlp_weights + self.router
        norms = len(kind.norms) * self.hidden + (2 * self.head_dim if kind.head_norms else 0)
        biases = (self.queries + 2 * self.keys) * (kind.qkv_bias or self.attention_bias)
        biases += self.hidden * self.attention_bias + (2 * self.intermediate + self.hidden) * self.mlp_bias
        return weights + norms + biases

    @property
    def end_parameters(self) -> int:
        """Return parameters of embedding, final norm and head, and of what else is outside of the layers."""
        return self.hidden * (self.vocab * (1 if self.tied else 2) + 1) + self.beside

    @property
    def parameters(self) -> int:
        if self.by_structure and self.held is not None:
            return self.held.count
        return self.layers * self.layer_parameters + self.end_parameters

    @property
    def weight_bytes(self) -> int:
        """Return bytes of all parameters, whole."""
        return MASTER * self.parameters if self.held is None else self.held.bytes

    @property
    def trained(self) -> int:
        """Return the parameters that have a gradient."""
        return self.parameters if self.held is None else self.held.trained

    @property
    def trained_bytes(self) -> int:
        """Return bytes of all gradients, and of one moment of each."""
        return MASTER * self.parameters if self.held is None else self.held.trained_bytes

    @property
    def layer_gathered(self) -> int:
        """Return parameters of one layer that are gathered, with those of adapters."""
        return self.layer_parameters if self.held is None else max(self.layer_parameters, self.held.layer)

    @property
    def layer_trained(self) -> int:
        """Return parameters of one layer of which there are sums of gradients."""
        return self.layer_parameters if self.held is None else self.held.layer_trained

    @property
    def layers_trained(self) -> int:
        """Return parameters of all layers that have a gradient."""
        return self.layers * self.layer_parameters if self.held is None else self.held.layers_trained

    @property
    def mlp_trained(self) -> int:
        """Return parameters of one MLP of which there are sums of gradients."""
        return self.mlp_weights + self.router if self.held is None else self.held.mlp_trained

    @property
    def norms_behind(self) -> bool:
        """Return whether norms are behind attention and the MLP."""
        return self.normed if self.by_structure else len(DECODERS[self.kind].norms) > 2

    @property
    def mlp_adapted(self) -> bool:
        """Return whether an MLP has more than its own parameters, such as adapters."""
        own = self.mlp_weights + self.router + self.mlp_bias * (2 * self.intermediate + self.hidden)
        return self.held is not None and self.held.mlp > own and not self.by_structure

    @property
    def adapted(self) -> bool:
        """Return whether a layer has more than its own parameters, such as adapters."""
        return self.layer_gathered > self.layer_parameters

    @property
    def uncut(self) -> bool:
        """Return whether `parallelize` splits no layers of it, and that of PyTorch shares no sequences among ranks."""
        return self.by_structure or self.kind in UNCUT

    @property
    def head_trained(self) -> int:
        """Return parameters of the head, where it is trained."""
        return self.hidden * self.vocab if self.held is None or self.held.trains_head else 0

    def split(self, ranks: int) -> "Decoder":
        """Return what a rank has of it under tensor parallelism: of heads, of the MLP's features and, at most, of the
        vocabulary its part; what every rank has whole is as large as before."""
        parts = {name: getattr(self, name) // ranks for name in ("heads", "kv_heads", "intermediate")}
        held = None if self.held is None else self.held.split(ranks)
        return self if ranks == 1 else replace(self, **parts, vocab=-(-self.vocab // ranks), held=held)

    def pairs(self, tokens: int) -> int:
        """Return the pairs of a query and a key that the layers of one sequence have together, of each layer half of all or,
        with a window, those in it."""
        every = tokens**2 // 2
        if self.window is None or self.window >= tokens:
            return self.layers * every
        cut = min(self.windowed, self.layers)
        return (self.layers - cut) * every + cut * (self.window * tokens - self.window**2 // 2)


def _of(sizes: tuple[int, ...], head_dim: int = 128, **more: Any) -> Decoder:
    names = ("hidden", "intermediate", "layers", "heads", "kv_heads", "vocab")
    return Decoder(**dict(zip(names, sizes, strict=True)), head_dim=head_dim, **more)


_QWEN2: dict[str, Any] = {"kind": "qwen2"}
_QWEN3: dict[str, Any] = {"kind": "qwen3"}
_GEMMA3: dict[str, Any] = {"kind": "gemma3_text", "tied": True}
# hidden, intermediate, layers, heads, key-value heads, vocabulary: those of each model's published config.json.
MODELS: Mapping[str, Decoder] = {
    "llama-2-7b": _of((4096, 11008, 32, 32, 32, 32000)),
    "llama-2-13b": _of((5120, 13824, 40, 40, 40, 32000)),
    "llama-3-8b": _of((4096, 14336, 32, 32, 8, 128256)),
    "llama-3-70b": _of((8192, 28672, 80, 64, 8, 128256)),
    "llama-3.2-1b": _of((2048, 8192, 16, 32, 8, 128256), 64, tied=True),
    "llama-3.2-3b": _of((3072, 8192, 28, 24, 8, 128256), tied=True),
    "mixtral-8x7b": _of((4096, 14336, 32, 32, 8, 32000), kind="mixtral", experts=8, chosen=2),
    "mixtral-8x22b": _of((6144, 16384, 56, 48, 8, 32768), kind="mixtral", experts=8, chosen=2),
    "mistral-7b": _of((4096, 14336, 32, 32, 8, 32768)),
    "qwen2.5-0.5b": _of((896, 4864, 24, 14, 2, 151936), 64, tied=True, **_QWEN2),
    "qwen2.5-1.5b": _of((1536, 8960, 28, 12, 2, 151936), tied=True, **_QWEN2),
    "qwen2.5-3b": _of((2048, 11008, 36, 16, 2, 151936), tied=True, **_QWEN2),
    "qwen2.5-7b": _of((3584, 18944, 28, 28, 4, 152064), **_QWEN2),
    "qwen2.5-14b": _of((5120, 13824, 48, 40, 8, 152064), **_QWEN2),
    "qwen2.5-32b": _of((5120, 27648, 64, 40, 8, 152064), **_QWEN2),
    "qwen2.5-72b": _of((8192, 29568, 80, 64, 8, 152064), **_QWEN2),
    "qwen3-0.6b": _of((1024, 3072, 28, 16, 8, 151936), tied=True, **_QWEN3),
    "qwen3-1.7b": _of((2048, 6144, 28, 16, 8, 151936), tied=True, **_QWEN3),
    "qwen3-4b": _of((2560, 9728, 36, 32, 8, 151936), tied=True, **_QWEN3),
    "qwen3-8b": _of((4096, 12288, 36, 32, 8, 151936), **_QWEN3),
    "qwen3-14b": _of((5120, 17408, 40, 40, 8, 151936), **_QWEN3),
    "qwen3-32b": _of((5120, 25600, 64, 64, 8, 151936), **_QWEN3),
    "qwen3-30b-a3b": _of((2048, 768, 48, 32, 4, 151936), kind="qwen3_moe", experts=128, chosen=8),
    "qwen3-235b-a22b": _of((4096, 1536, 94, 64, 4, 151936), kind="qwen3_moe", experts=128, chosen=8),
    "gemma-3-1b": _of((1152, 6912, 26, 4, 1, 262144), 256, window=512, windowed=22, **_GEMMA3),
    "phi-4": _of((5120, 17920, 40, 40, 10, 100352), kind="phi3"),
    "smollm3-3b": _of((2048, 11008, 36, 16, 4, 128256), tied=True, kind="smollm3"),
    "smollm2-135m": _of((576, 1536, 30, 9, 3, 49152), 64, tied=True),
    "smollm2-360m": _of((960, 2560, 32, 15, 5, 49152), 64, tied=True),
    "smollm2-1.7b": _of((2048, 8192, 24, 32, 32, 49152), 64, tied=True),
}

# Scores of attention, or logits, that stay below a cap. In PyTorch transformers writes the scores of all pairs, of which there
# is no formula.
SCORE_CAP, LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"
CAPS = SCORE_CAP, LOGIT_CAP
# Of which null is a value: as many as query heads, no window, no cap.
_NULLABLE = ("num_key_value_heads", "sliding_window", *CAPS)
_TERMS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
}
FAMILIES = tuple(DECODERS)
# Of which every scope has a formula; of the others scope="block".
WHOLE = ("llama", "mistral", "qwen2", "qwen3")
_CUT = " parallelize cuts every parameter along them into equal parts."
# Of which `parallelize` splits no layers, and that of PyTorch shares no sequences.
UNCUT = ("phi3",)


def decoder_named(model: str, other: Callable[[dict[str, Any], str], Decoder] | None = None) -> Decoder:
    """Return a decoder's sizes.

    Args:
        model: a name of `MODELS`, the path of a config.json, or a Hugging Face folder that has one.
        other: reads a config of which there are no formulas, and is given the words for messages; None: it is refused.
    Raises:
        InputError: it is none of these, or the file is of another kind of model.
    """
    known = MODELS.get(model.lower())
    if known is not None:
        return known
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        names = ", ".join(MODELS)
        raise InputError(f"plan: --model must be a config.json, a folder with one, or one of {names}; got {model}.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"plan: --model {path} cannot be read: {error}.") from error
    if other is not None and isinstance(config, dict) and reason_no_formulas(config) is not None:
        return other(config, f"plan: --model {path}")
    return decoder_of(config, str(path))


def decoder_of(config: object, source: str, command: str = "plan") -> Decoder:
    """Return the sizes that the dictionary of a config.json says. source: the file, and command: whose, for messages.

    Raises:
        InputError: it is of another kind of model, or a size is missing or none.
    """
    return decoder_from(config, f"{command}: --model {source}")


def decoder_from(config: object, what: str) -> Decoder:
    """Return the sizes that a dictionary of transformers says. what: the function and the argument that it is of, for messages.

    Raises:
        InputError: it is of another kind of model, or a size is missing or none.
    """
    reason = _reason_unknown(config if isinstance(config, dict) else {"model_type": type(config).__name__})
    if reason is not None or not isinstance(config, dict):
        raise InputError(f"{what} must have {reason}")
    kind, config = config["model_type"], _whole(config)
    experts = DECODERS[kind].experts
    terms = {"intermediate": "intermediate_size"} | _TERMS
    if experts is not None:
        terms |= {"experts": experts.count, "chosen": experts.chosen, "intermediate": experts.intermediate}
    sizes: dict[str, Any] = {name: config.get(term) for name, term in terms.items()}
    sizes["kv_heads"] = config.get("num_key_value_heads") or sizes["heads"]
    bad = [terms.get(name, name) for name, size in sizes.items() if type(size) is not int or size < 1]
    if bad:
        raise InputError(f"{what} must have whole numbers >= 1 for {', '.join(bad)}.")
    try:
        windows = [int(window) for window in layer_windows(config) if window is not None]
    except (IndexError, TypeError, ValueError) as error:
        raise InputError(f"{what}: its windows cannot be read: {error}.") from error
    return Decoder(
        **sizes,
        head_dim=config.get("head_dim") or sizes["hidden"] // sizes["heads"],
        tied=bool(config["tie_word_embeddings"]),
        kind=kind,
        attention_bias=biases(config).out,
        mlp_bias=biases(config).mlp,
        caps=tuple(cap for cap in CAPS if config.get(cap)),
        window=windows[0] if windows else None,
        windowed=len(windows),
    )


def reason_no_formulas(config: Mapping[str, Any]) -> str | None:
    """Return what a dictionary of transformers must have to be one of which PyTorch has formulas; None where it has that."""
    reason = _reason_unknown(config)
    if reason is not None:
        return reason
    capped = next((cap for cap in CAPS if _whole(config).get(cap)), None)
    return None if capped is None else f"no {capped}, got {_whole(config)[capped]}. Of it there is no formula."


def _reason_unknown(config: Mapping[str, Any]) -> str | None:
    """Return what it must have to be one of which a half has formulas."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        return f"a model_type of {', '.join(FAMILIES)}, got {kind}."
    config = _whole(config)
    for term, only in DECODERS[kind].fixed.items():
        if config.get(term, only) not in (only, None):
            return f"{term} {only}, got {config[term]}. Of another value there is no formula."
    if config.get("mlp_only_layers"):
        return f"no mlp_only_layers, got {config['mlp_only_layers']}. All layers have experts."
    return None


def _whole(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dictionary of a family that has formulas, with what it leaves to defaults."""
    decoder = DECODERS[config["model_type"]]
    given = {term: value for term, value in config.items() if value is not None or term in _NULLABLE}
    return {**decoder.defaults, **(given if decoder.experts is None else decoder.experts.counted(given))}


def tensor_ranks(decoder: Decoder, gpus: int, half: Half) -> list[int]:
    """Return the numbers of ranks that may split every layer, ascending: divisors of the GPUs, of the heads and of the MLP.

    In JAX so many that the rest, over which every parameter is sharded, divides the hidden features.
    """
    cut = not decoder.uncut and not decoder.experts and not _normed_branches(decoder, half)
    even = gcd(gpus, decoder.heads, decoder.kv_heads, decoder.intermediate) if cut else 1
    sharding = decoder.hidden if half == "jax" else gpus
    return [ranks for ranks in range(1, even + 1) if even % ranks == 0 and sharding % (gpus // ranks) == 0]


def _normed_branches(decoder: Decoder, half: Half) -> bool:
    """Return whether layers have norms behind attention and the MLP, of which, where they are split, JAX has no formula."""
    return half == "jax" and len(DECODERS[decoder.kind].norms) > 2


def check_tensor(decoder: Decoder, tp: int, gpus: int, half: Half, command: str = "plan") -> None:
    """Refuse a --tp that cannot be. gpus: in all. command: for messages.

    Raises:
        InputError: with what it must be.
    """
    if tp in tensor_ranks(decoder, gpus, half):
        return
    hint = ""
    if decoder.by_structure:
        rule, hint = f"be 1 for {decoder.kind}", " Its layers are sharded, and not split."
    elif decoder.kind in UNCUT:
        rule, hint = f"be 1 for {decoder.kind}", " Its projections are fused."
    elif decoder.experts:
        rule, hint = f"be 1 for {decoder.kind}", " Its experts are not split."
    elif _normed_branches(decoder, half):
        rule, hint = f"be 1 for {decoder.kind} in JAX", " There is no formula of its layers where they are split."
    elif gpus % tp:
        rule = f"divide the {gpus} GPUs" if gpus > 1 else "be 1 on one GPU"
    elif decoder.hidden % (gpus // tp) and half == "jax":
        rule = f"leave of {gpus} GPUs as many as divide the model's {decoder.hidden} hidden features in JAX"
        hint = _CUT
    else:
        sizes = (
            f"{decoder.heads} heads, {decoder.kv_heads} key-value heads and {decoder.intermediate} features of an MLP"
        )
        rule = f"divide the model's {sizes}"
    raise InputError(f"{command}: --tp must {rule}, got {tp}.{hint}")


def check_planned(
    decoder: Decoder, half: Half, gpus: int, command: str = "plan", *, names: tuple[str, str] | None = None
) -> None:
    """Refuse a decoder of which a half has no formulas, or that it does not shard over so many GPUs.

    command, names: for messages, the second what it calls the model and the number of GPUs; None: by its flags.

    Raises:
        InputError: with what it can.
    """
    model, many = names or ("--model", "--gpus" if command == "plan" else "the devices")
    if half == "torch" and decoder.caps:
        raise InputError(f"{command}: {model} must have no {decoder.caps[0]} in PyTorch. Of it there is no formula.")
    if not tensor_ranks(decoder, gpus, half):
        raise InputError(
            f"{command}: {many} must divide the model's {decoder.hidden} hidden features in JAX, got {gpus}.{_CUT}"
        )
