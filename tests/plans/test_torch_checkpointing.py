"""What the modes of `Checkpointing` keep and compute again, to the byte and to the FLOP; named streams; compiled blocks."""

import copy
import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from shared_specs.config import Checkpointing, Compile, ParallelConfig
from shared_specs.errors import SpecError, UnsupportedError
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.core.torch_counting import GemmFlop, LiveBytes
from tests.models.torch_decoders import BATCH, LENGTH, batch, decoder, loss_of
from tests.plans.ranks_torch_plans import error_between
from tiled_torch import TiledMLP
from tiled_torch.models import tile_model
from tiled_torch.models.block.host_memory import host_memory
from tiled_torch.parallel import Plan, parallelize, register_plan, seed_parallel

TOKENS, HIDDEN, FEATURES = BATCH * LENGTH, 16, 24
ROW, WIDE_ROW = 8 * TOKENS * HIDDEN, 8 * TOKENS * FEATURES  # bytes of [T, H] and [T, I] in float64
SQUARE, WIDE = 2 * TOKENS * HIDDEN * HIDDEN, 2 * TOKENS * HIDDEN * FEATURES  # FLOP of one projection
GRADIENTS = 8 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FEATURES + 2 * HIDDEN)  # bytes of those of a layer
MODES = {
    "nothing": None,
    "full": Checkpointing(),
    "layers": Checkpointing(mode="layers", every=2),
    "products": Checkpointing(mode="products"),
    "op": Checkpointing(mode="op"),
}


def llama(layers: int, tiled: str) -> Any:
    """tiled: "" not at all, "tiled_mlp", or "tile" because a projection has a hook."""
    model = decoder(num_hidden_layers=layers)
    if tiled == "tile":
        for layer in model.model.layers:
            layer.mlp.up_proj.register_forward_hook(lambda *_: None)
    return tile_model(model, num_shards=3) if tiled else model


def per_layer(mode: str, tiled: str) -> tuple[int, int]:
    """Bytes alive between forward and backward, and FLOP of products in backward, of one layer."""
    kept, flop, _ = one_more(mode, tiled)
    return kept, flop


@functools.cache
def one_more(mode: str, tiled: str) -> tuple[int, ...]:
    """What a layer adds to bytes alive before backward, to FLOP of products in backward, and to the peak of both passes:
    the difference between a model with four layers and one with two."""
    found = []
    for layers in (2, 4):
        model: Any = parallelize(llama(layers, tiled), None, ParallelConfig(checkpointing=MODES[mode]))
        with LiveBytes() as live, GemmFlop() as products:
            loss = loss_of(model, *batch(), inside=True, cache=False)
            kept, forward = live.now, products.flop
            loss.backward()
        found.append((kept, products.flop - forward, live.peak))
    return tuple((many - few) // 2 for few, many in zip(*found, strict=True))


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # the compiler's own look
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("tiled", ["", "tiled_mlp"])
def test_offloaded_inputs_are_in_host_memory(graphs: dict[str, list[int]], tiled: str) -> None:
    """What each layer keeps is there, for compiled blocks too, and the gradients are the same."""
    expected = loss_of(model := llama(3, tiled), *batch(), inside=True, cache=False)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for compiled in (None, Compile()):
        config = ParallelConfig(checkpointing=Checkpointing(offload=True), compile=compiled)
        model = parallelize(llama(3, tiled), None, config)
        host_memory.cache_clear()
        # From torch 2.14 on what is compiled runs as it is under a mode of operations, and in backward there is none.
        with nullcontext() if compiled else LiveBytes() as live:
            loss = loss_of(model, *batch(), inside=True, cache=False)
            kept, waiting = live and live.now, host_memory(torch.device("cpu")).bytes
        on_device = parallelize(llama(3, tiled), None, ParallelConfig(checkpointing=MODES["full"]))
        with LiveBytes() as live:
            again = loss_of(on_device, *batch(), inside=True, cache=False)
        assert waiting == 3 * ROW
        assert compiled or kept == live.now  # as many bytes, but elsewhere
        del again
        loss.backward()
        assert error_between({name: p.grad for name, p in model.named_parameters()}, gradients) <= DISTRIBUTED_FLOAT64


@pytest.mark.parametrize("tiled", ["", "tiled_mlp", "tile"])
def test_full_keeps_the_input_of_a_layer(tiled: str) -> None:
    """And computes again all products but the last, whose result backward does not need (a tiled MLP: not at all)."""
    kept, flop = per_layer("full", tiled)
    assert kept == ROW
    again = 4 * SQUARE + {"": 2 * WIDE, "tiled_mlp": 0, "tile": 0}[tiled]
    found_by_tile = 2 * 2 * HIDDEN * FEATURES * 3 if tiled == "tile" else 0  # it tries two tokens to see what fn needs
    assert flop - per_layer("nothing", tiled)[1] == again + found_by_tile


@pytest.mark.parametrize("tiled", ["", "tiled_mlp", "tile"])
def test_layers_is_full_for_every_second_one(tiled: str) -> None:
    for value, full, nothing in zip(*(per_layer(mode, tiled) for mode in ("layers", "full", "nothing")), strict=True):
        assert 2 * value == full + nothing


@pytest.mark.parametrize(("every", "full"), [(1, [0, 1, 2, 3]), (2, [1, 3]), (3, [2]), (4, [3]), (5, [])], ids=str)
def test_which_layers_keep_only_their_input(every: int, full: list[int]) -> None:
    """The last of every so many; the others keep more, and the gradients are the same."""
    plain = llama(4, "")
    loss_of(plain, *batch(), inside=True, cache=False).backward()
    config = ParallelConfig(checkpointing=Checkpointing(mode="layers", every=every))
    model: Any = parallelize(llama(4, ""), None, config)
    with LiveBytes() as live:
        before: list[int] = []
        kept: list[int] = []
        for layer in model.model.layers:  # its result, which is the input of the next one, counts as its own
            layer.register_forward_pre_hook(lambda *_: before.append(live.now))
            layer.register_forward_hook(lambda *_: kept.append(live.now - before[-1]))
        loss = loss_of(model, *batch(), inside=True, cache=False)
        assert [number for number, bytes_ in enumerate(kept) if bytes_ == ROW] == full
        assert len(kept) == 4
        loss.backward()
    found, expected = ({name: p.grad for name, p in m.named_parameters()} for m in (model, plain))
    assert error_between(found, expected) <= DISTRIBUTED_FLOAT64


@pytest.mark.parametrize("tiled", ["", "tiled_mlp"])
@pytest.mark.parametrize("mode", MODES)
def test_peak_bytes(mode: str, tiled: str) -> None:
    """A layer adds what it keeps, to a peak before its own backward, or its gradients, to one after."""
    kept, _, peak = one_more(mode, tiled)
    assert peak == max(kept, GRADIENTS)


def test_products_keeps_every_second_one() -> None:
    """q, v, gate and down beside the input; k, o and up are computed again."""
    kept, flop = per_layer("products", "")
    assert kept == ROW + 3 * ROW + WIDE_ROW
    assert flop - per_layer("nothing", "")[1] == 2 * SQUARE + WIDE
    assert per_layer("full", "")[0] < kept < per_layer("nothing", "")[0] / 2


@pytest.mark.parametrize("tiled", ["tiled_mlp", "tile"])
def test_products_does_not_take_apart_what_is_tiled(tiled: str) -> None:
    """Of the shards of an MLP nothing is kept; of the two tokens that `tile` tries, gate and down."""
    kept, flop = per_layer("products", tiled)
    tried = 8 * 2 * (FEATURES + HIDDEN) if tiled == "tile" else 0
    assert kept == ROW + 2 * ROW + tried
    again = 2 * 2 * HIDDEN * FEATURES if tiled == "tile" else 0
    assert flop - per_layer("nothing", tiled)[1] == 2 * SQUARE + again


class Attends(TorchDispatchMode):
    """How often attention is called, or is made of products; not its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator.name()
        self.calls += name == "aten::bmm" or ("attention" in name and "backward" not in name)
        return operator(*args, **(kwargs or {}))


def attended(mode: str, kernel: str) -> tuple[int, int, Any]:
    """Calls in forward and in backward of two layers, and the gradients. kernel: PyTorch's on a CPU, its "math", or products
    of the model's own ("eager"): two in forward, four in backward."""
    model: Any = llama(2, "tiled_mlp")
    model.set_attn_implementation("eager" if kernel == "eager" else "sdpa")
    parallelize(model, None, ParallelConfig(checkpointing=MODES[mode]))
    backend = SDPBackend.MATH if kernel == "math" else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(backend), Attends() as calls:
        loss = loss_of(model, *batch(), inside=True, cache=False)
        forward = calls.calls
        loss.backward()
    return forward, calls.calls - forward, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("kernel", ["flash", "math", "eager"])
def test_op_does_not_attend_again(kernel: str) -> None:
    """What a kernel of attention returned is there; of attention made of products the scores are computed again alone."""
    found = {mode: attended(mode, kernel) for mode in ("nothing", "products", "op")}
    calls = {mode: (forward, backward) for mode, (forward, backward, _) in found.items()}
    if kernel == "flash":
        assert calls == {"nothing": (2, 0), "products": (2, 2), "op": (2, 0)}
    else:
        assert calls == {"nothing": (4, 8), "products": (4, 12), "op": (4, 10)}
    assert error_between(found["op"][2], found["nothing"][2]) <= DISTRIBUTED_FLOAT64


def test_bytes_of_op() -> None:
    """Beside what "products" keeps [T, H] and, for each token and head, the logarithm of a sum; as many products again."""
    heads, itemsize = 4, 8
    for tiled in ("", "tiled_mlp"):
        kept, flop = per_layer("products", tiled)
        assert per_layer("op", tiled) == (kept + ROW + TOKENS * heads * itemsize, flop)


@torch.library.custom_op("tests_of_op::flash_attn_forward", mutates_args=())
def packaged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as a package brings it."""
    return nn.functional.scaled_dot_product_attention(q, k, v)


@torch.library.custom_op("tests_of_op::_attention_into", mutates_args={"out"})
def written(q: Tensor, out: Tensor) -> None:
    out.copy_(q)


class Packaged(nn.Module):
    """A layer whose attention is an operator of somebody else's, in a function with a derivative of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + Attend.apply(self.q(x)).sin()


class Attend(torch.autograd.Function):
    runs = 0

    @staticmethod
    def forward(ctx: Any, q: Tensor) -> Tensor:
        out = torch.empty_like(q)
        written(q, out)
        return packaged(out, q, q)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class Packages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Packaged() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("mode", "again"), [("full", 2), ("op", 0)])
def test_attention_of_packages(mode: str, again: int) -> None:
    """Found by its name. One that writes over an argument is called again, or its replay would read what is not there."""
    register_plan(Packages, Plan(blocks="layers"), replace=True)
    torch.manual_seed(0)
    plain, x = Packages(), torch.randn(2, 1, 3, 8)
    model: Any = parallelize(copy.deepcopy(plain), None, ParallelConfig(checkpointing=MODES[mode]))
    plain(x).sum().backward()
    loss = model(x).sum()
    with Named("tests_of_op::flash_attn_forward") as calls, Named("tests_of_op::_attention_into") as writes:
        loss.backward()
    assert (calls.count, writes.count) == (again, 2)
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


class Named(TorchDispatchMode):
    """How often the operator of a name is called."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operator.name() == self.name
        return operator(*args, **(kwargs or {}))


class NamedDropout(nn.Module):
    """Dropout from a named stream."""

    def __init__(self, streams: Any) -> None:
        super().__init__()
        self.streams = streams

    def forward(self, x: Tensor) -> Tensor:
        with self.streams.fork("tensor-parallel"):
            return nn.functional.dropout(x)


class Dropping(nn.Module):
    """Dropout from a named stream, and from the default generator."""

    def __init__(self, streams: Any) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), NamedDropout(streams)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.first(x).relu())
        return self.second(nn.functional.dropout(x)).tanh()


class Drops(nn.Module):
    def __init__(self, streams: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dropping(streams) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def dropped(mode: str, compile: Compile | None = None) -> list[Any]:
    """The gradients, and a number of each stream drawn afterwards."""
    streams = seed_parallel(3)
    model: Any = parallelize(Drops(streams), None, ParallelConfig(checkpointing=MODES[mode], compile=compile))
    model(torch.randn(4, 8)).sum().backward()
    with streams.fork("tensor-parallel"):
        after = torch.rand(1)
    return [*(p.grad for p in model.parameters()), after, torch.rand(1)]


@pytest.mark.parametrize("mode", ["full", "layers", "products", "op"])
def test_named_streams_are_drawn_from_again(mode: str) -> None:
    register_plan(Drops, Plan(blocks="layers"), replace=True)
    for found, expected in zip(dropped(mode), dropped("nothing"), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_named_streams_of_compiled_blocks(graphs: dict[str, list[int]]) -> None:
    """Compiled inside its checkpoint, a layer draws again as it drew; from inside a selective one it is refused."""
    register_plan(Drops, Plan(blocks="layers"), replace=True)
    for found, expected in zip(dropped("full", Compile()), dropped("nothing"), strict=True):
        assert torch.equal(found, expected)
    assert graphs["forward"]
    with pytest.raises(SpecError, match=r"RandomStates\.fork: this call is inside torch\.utils\.checkpoint"):
        dropped("products", Compile())
    with pytest.raises(SpecError, match=r"RandomStates\.fork: this call is inside torch\.utils\.checkpoint"):
        dropped("op", Compile())


def products_of(graph: Any) -> int:
    return sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes)


def attention_in(graph: Any) -> int:
    """Calls that are not of its backward; one that is repeated may be given, with its random state, to another operator."""
    found = (one for node in graph.graph.nodes for one in (node.target, *node.args))
    names = [one.name() for one in found if isinstance(one, torch._ops.OpOverload)]
    return sum("attention" in name and "backward" not in name for name in names)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Products in every forward and backward graph that AOT autograd makes of what is compiled from now on."""
    found: dict[str, list[int]] = {"forward": [], "backward": []}

    def compiler(direction: str) -> Any:
        def compile_graph(graph: Any, _: Any) -> Any:
            found[direction].append(products_of(graph))
            attends[direction] = attention_in(graph)
            return graph

        return compile_graph

    backend = aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch.compiler.reset()
    return found


# Products of a layer in its forward and backward graph; those of a tiled MLP are inside one operator.
COMPILED = {
    ("full", ""): (7, 14 + 6),
    ("products", ""): (7, 14 + 3),
    ("full", "tiled_mlp"): (4, 8 + 4),
    ("products", "tiled_mlp"): (4, 8 + 2),
    ("op", ""): (7, 14 + 3),
}


attends: dict[str, int] = {}
"""How often the graphs compiled last attend, by direction."""


@pytest.mark.deep_but(1)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(
    ("mode", "tiled"),
    [
        pytest.param(*key, marks=[pytest.mark.slow, pytest.mark.figures] if key == ("full", "") else ())
        for key in COMPILED
    ],
)
def test_compiled_blocks_are_one_graph(graphs: dict[str, list[int]], mode: str, tiled: str) -> None:
    """One for all equal layers, its checkpoint inside; the numbers are those of one that is not compiled."""
    plain = llama(3, tiled)
    expected_loss = loss_of(plain, *batch(), inside=True, cache=False)
    expected_loss.backward()
    model: Any = parallelize(llama(3, tiled), None, ParallelConfig(checkpointing=MODES[mode], compile=Compile()))
    loss = loss_of(model, *batch(), inside=True, cache=False)
    loss.backward()
    forward, backward = COMPILED[mode, tiled]
    assert graphs == {"forward": [forward], "backward": [backward]}
    assert attends == {"forward": 1, "backward": 0 if mode == "op" else 1}
    assert abs(loss.item() - expected_loss.item()) <= DISTRIBUTED_FLOAT64 * expected_loss.item()
    found, expected = ({name: p.grad for name, p in m.named_parameters()} for m in (model, plain))
    assert error_between(found, expected) <= DISTRIBUTED_FLOAT64


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
def test_blocks_that_tile_breaks_are_compiled_inside_their_checkpoints(graphs: dict[str, list[int]]) -> None:
    """Attention and norms; PyTorch would leave a checkpoint around a broken graph as it is, all of the block in it."""
    plain = llama(2, "tile")
    loss_of(plain, *batch(), inside=True, cache=False).backward()
    model: Any = parallelize(llama(2, "tile"), None, ParallelConfig(checkpointing=MODES["full"], compile=Compile()))
    loss_of(model, *batch(), inside=True, cache=False).backward()
    assert sum(graphs["forward"]) == 4
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
        assert not copied(input_ids=batch()[0], use_cache=False).logits.any()  # of its own weights
    found, expected = ({name: p.grad for name, p in m.named_parameters()} for m in (model, plain))
    assert error_between(found, expected) <= DISTRIBUTED_FLOAT64
    with pytest.raises(UnsupportedError, match=r"with config\.compile where an MLP goes through tile"):
        parallelize(llama(2, "tile"), None, ParallelConfig(checkpointing=MODES["products"], compile=Compile()))
    with pytest.raises(UnsupportedError, match=r"where an MLP goes through tile, got 'op'"):
        parallelize(llama(2, "tile"), None, ParallelConfig(checkpointing=MODES["op"], compile=Compile()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tiled", [False, True])
def test_compiled_ends(graphs: dict[str, list[int]], tiled: bool) -> None:
    """Embedding, norm and head, tied ones too; of a tiled model not the head, which its loss does not call."""
    model: Any = decoder(num_hidden_layers=1, tie_word_embeddings=True)
    if tiled:
        tile_model(model, num_shards=3)
    parallelize(model, None, ParallelConfig(compile=Compile(ends=True)))
    loss_of(model, *batch(), inside=True, cache=False).backward()
    assert sorted(graphs["forward"]) == ([0, 0, 4] if tiled else [0, 0, 1, 7])


def test_what_was_applied_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Without a mesh too, and nothing of what is refused."""
    caplog.set_level("INFO", "tiled_torch")
    config = ParallelConfig(checkpointing=MODES["op"])
    model = parallelize(llama(2, "tile"), None, config)
    with pytest.raises(SpecError):
        parallelize(model, None, config)
    parallelize(TiledMLP(8, 12), None, ParallelConfig())
    reason = "tile: up_proj has hooks"
    assert [record.getMessage() for record in caplog.records] == [
        f"parallelize: tiling: 2 x {reason}, 1 x tiled_linear_cross_entropy",
        "parallelize: checkpointing: mode=op",
        "parallelize: tiling: 1 x tiled_mlp",
    ]


def test_ends_of_a_model_without_any_are_refused() -> None:
    with pytest.raises(
        SpecError, match=r"config\.compile\.ends must be False for a model whose plan has no ends, got True"
    ):
        parallelize(TiledMLP(8, 12), None, ParallelConfig(compile=Compile(ends=True)))


@pytest.mark.filterwarnings("ignore")
def test_a_copy_of_compiled_ends_computes_with_its_own_weights() -> None:
    model = parallelize(decoder(num_hidden_layers=1), None, ParallelConfig(compile=Compile(ends=True)))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
        with torch.compiler.set_stance("force_eager"):
            hidden = torch.ones(1, HIDDEN, dtype=copied.lm_head.weight.dtype)
            assert not copied.lm_head(hidden).any()
            assert model.lm_head(hidden).any()
