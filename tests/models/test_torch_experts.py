"""Tiled experts alone: exact values and gradients for every form of them, experts without tokens, FLOP, bytes, hooks."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

from shared_specs import SpecError, Tiling, UnsupportedError
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import BF16_256_SHARDS, DISTRIBUTED_FLOAT64, MODEL_FLOAT32
from tests.core.torch_counting import GemmFlop, LiveBytes, saved_bytes
from tiled_torch import tile_model, tiling_paths, untile_model
from tiled_torch.moe.loops import ExpertsCall
from tiled_torch.moe.routes import Routes

transformers = pytest.importorskip("transformers")

H, I, E, K = 16, 20, 4, 2  # noqa: E741
SIZES = {"hidden_size": H, "intermediate_size": I, "moe_intermediate_size": I, "num_local_experts": E, "num_experts": E}
SIZES |= {
    "n_routed_experts": E,
    "num_experts_per_tok": K,
    "moe_num_experts": E,
    "num_attention_heads": 2,
    "moe_latent_size": None,
}
SIZES |= {"expert_ffn_hidden_size": I, "zero_expert_num": 2}
# One model for each form: gated; biases, transposed and interleaved; no gate; transposed; another gate; not declared; choices
# that are handed on; three matrices of a child.
FORMS = {
    "mixtral": ("mixtral", "MixtralExperts"),
    "gpt_oss": ("gpt_oss", "GptOssExperts"),
    "nemotron_h": ("nemotron_h", "NemotronHExperts"),
    "aria_text": ("aria", "AriaExperts"),
    "deepseek_v4": ("deepseek_v4", "DeepseekV4Experts"),
    "granitemoe": ("granitemoe", "GraniteMoeExperts"),
    "step3p5": ("step3p7", "Step3p7Experts"),
    "longcat_flash": ("longcat_flash", "LongcatFlashExperts"),
    "dbrx": ("dbrx", "DbrxExperts"),
}
DBRX = {"hidden_size": H, "ffn_hidden_size": I, "moe_num_experts": E, "moe_top_k": K}


def experts_of(kind: str, implementation: str = "eager", dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    folder, name = FORMS[kind]
    module = __import__(f"transformers.models.{folder}.modeling_{folder}", fromlist=[name])
    config = transformers.AutoConfig.for_model(kind, **SIZES, d_model=H, ffn_config=DBRX)
    config = config.ffn_config if kind == "dbrx" else config
    config._experts_implementation = implementation
    experts = getattr(module, name)(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.5)
    return experts.to(dtype)


def choice(tokens: int, experts: int = E, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H], the experts [T, k] and their weights, of which a leaf."""
    torch.manual_seed(1)
    x = torch.randn(tokens, H, dtype=torch.float64).to(dtype).requires_grad_()
    weights, index = torch.rand(tokens, experts, dtype=torch.float64).topk(K, -1)
    return x, index, weights.to(dtype).requires_grad_()


def gradients(experts: Any, x: Tensor, index: Tensor, weights: Tensor) -> list[Tensor]:
    """y, and the gradients of x, the weights and every parameter that wants one."""
    torch.manual_seed(2)
    y = experts(x, index, weights)
    wanted = [a for a in (x, weights, *experts.parameters()) if a.requires_grad]
    dy = torch.randn(y.shape, dtype=torch.float64).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, wanted, dy)]


def assert_same(found: list[Tensor], expected: list[Tensor], limit: float = DISTRIBUTED_FLOAT64) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.isfinite().all()
        assert ours.dtype == theirs.dtype
        assert relative_error(ours.double().numpy(), theirs.double().numpy()) <= limit


@pytest.mark.parametrize("kind", FORMS)
def test_every_form(kind: str) -> None:
    experts, given = experts_of(kind), choice(37, experts=E + 2 * (kind == "longcat_flash"))
    expected = gradients(experts, *given)
    keys = list(experts.state_dict())
    for shards in (1, 5, 37):
        tile_model(experts, num_shards=shards)
        assert_same(gradients(experts, *given), expected)
        assert tiling_paths(experts) == {"": "tiled_experts"}
    assert list(experts.state_dict()) == keys


def test_experts_without_tokens() -> None:
    """Some in no shard, some in a few: gradients of 0, no NaN. A number beyond the last is nobody's."""
    experts, (x, index, weights) = experts_of("gpt_oss"), choice(24, experts=3)
    index[:12] = index[:12].clamp(max=1)
    index[:12, 1] = 1 - index[:12, 0]
    tile_model(experts, num_shards=6)
    whole = gradients(experts, x, index, weights)
    assert_same(whole, gradients(untile_model(copy.deepcopy(experts)), x, index, weights))
    for gradient in whole[3:]:
        assert not gradient[3].any()
        assert gradient[2].any()
    beyond = index.clone()
    beyond[5] = E
    y, dx, dweights, *_ = gradients(experts, x, beyond, weights)
    assert not y[5].any()
    assert not dx[5].any()
    assert not dweights[5].any()


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int) -> None:
    experts = tile_model(experts_of("mixtral"), num_shards=3)
    found = gradients(experts, *choice(tokens))
    assert all(gradient.isfinite().all() for gradient in found)
    assert [tuple(a.shape) for a in found[:3]] == [(tokens, H), (tokens, H), (tokens, K)]
    assert not tokens or found[3].any()


@pytest.mark.parametrize("frozen", ["x", "weights", "gate_up_proj", "down_proj", "all parameters", "all but weights"])
def test_frozen_operands(frozen: str) -> None:
    """What needs no gradient is not computed, and the others are the same."""
    experts, (x, index, weights) = experts_of("gpt_oss"), choice(21)
    named = {"x": x, "weights": weights, **dict(experts.named_parameters())}
    for name, tensor in named.items():
        off = name == frozen or (frozen == "all parameters" and name not in ("x", "weights"))
        tensor.requires_grad_(not (off or (frozen == "all but weights" and name != "weights")))
    expected = gradients(experts, x, index, weights)
    assert_same(gradients(tile_model(experts, num_shards=4), x, index, weights), expected)


def test_groups_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sums of dx for all tokens would take more than those of the weights, tokens come in groups of shards."""
    experts, given = experts_of("mixtral"), choice(50)
    expected = gradients(experts, *given)
    tile_model(experts, tiling=Tiling(shard_tokens=4))
    found = []
    monkeypatch.setattr(ExpertsCall, "_group_tokens", lambda self, x, w: found.append(self.shard_tokens) or 12)
    assert_same(gradients(experts, *given), expected)
    assert found == [4]


def test_a_simulation_shares_tokens_evenly() -> None:
    """Fake tensors, by which a step's memory is planned, choose no experts."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    experts = tile_model(experts_of("mixtral"), num_shards=4)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x, index, weights = (mode.from_tensor(a) for a in choice(21))
        y = experts(x, index, weights)
        y.sum().backward()
    assert y.shape == (21, H)
    assert [run.stop - run.start for _, runs in Routes(index, E, 21, 21) for run in runs] == [10, 11, 10, 11]


def test_routes_name_every_pair_once() -> None:
    index = choice(29)[1]
    index[3] = E
    routes = Routes(index, E, group_tokens=10, rows=3)
    seen = []
    for tokens, runs in routes:
        for run in runs:
            pairs = torch.cat([routes.order[piece] for piece in run.pieces])
            assert all(piece.stop - piece.start <= 3 for piece in run.pieces)
            assert (index.reshape(-1)[pairs] == run.expert).all()
            assert ((pairs // K >= tokens.start) & (pairs // K < tokens.stop)).all()
            seen += pairs.tolist()
    assert sorted(seen) == [pair for pair in range(29 * K) if pair // K != 3]


FLOP = {"none": 22, "non-reentrant": 22, "reentrant": 28}


@pytest.mark.parametrize("mode", FLOP)
def test_flop(mode: str) -> None:
    """22 T k H I, as of an MLP: the second product is not recomputed, and a replay stops before both."""
    experts, (x, index, weights) = tile_model(experts_of("mixtral"), num_shards=4), choice(32)

    def block(x: Tensor) -> Tensor:
        return x + experts(x, index, weights)

    with GemmFlop() as counter:
        y = block(x) if mode == "none" else checkpoint(block, x, use_reentrant=mode == "reentrant")
        y.sum().backward()
    assert counter.flop == FLOP[mode] * 32 * K * H * I


def test_what_is_handed_on_costs_no_products() -> None:
    experts, (x, index, weights) = tile_model(experts_of("longcat_flash"), num_shards=4), choice(32)
    with GemmFlop() as counter:
        y = experts(x, torch.full_like(index, E), weights)
        y.sum().backward()
    assert counter.flop == 0
    given = weights.detach().sum(-1, keepdim=True)
    assert_same([y.detach(), x.grad], [x.detach() * given, given.expand(-1, H)])
    assert not experts.down_proj.grad.any()


def test_saved_bytes() -> None:
    """Nothing but what the call was given."""
    experts, given = tile_model(experts_of("mixtral"), num_shards=4), choice(40)
    _, found = saved_bytes(lambda: experts(*given), exclude=[*given, *experts.parameters()])
    assert found == 0


def peak(experts: Any, given: tuple[Tensor, Tensor, Tensor]) -> int:
    with LiveBytes() as live:
        experts(*given).sum().backward()
    return live.peak


def test_peak_bytes() -> None:
    """Beside rows of x and y, bytes of one shard, however many tokens there are; untiled they are of all pairs."""
    experts = experts_of("mixtral", dtype=torch.float32)
    many, few = choice(1024, dtype=torch.float32), choice(512, dtype=torch.float32)
    tile_model(experts, tiling=Tiling(shard_tokens=32))
    grown = peak(experts, many) - peak(experts, few)
    rows = 512 * H * 4 * 3 + 512 * K * (
        8 * 6 + 4 * 4
    )  # y, dy, dx; numbers of pairs, several times while they are sorted
    assert grown <= rows
    untile_model(experts)
    assert peak(experts, many) - peak(experts, few) > 512 * K * I * 4 * 4


def test_no_gradient_of_a_view_is_copied() -> None:
    """DBRX's last matrix is read transposed. Its gradient is made as the parameter lies: of few tokens the peak is that of the
    gradients and the largest is one of them.
    """
    experts, given = tile_model(experts_of("dbrx"), num_shards=1), choice(1)
    sizes = sum(parameter.nbytes for parameter in experts.parameters())
    with LiveBytes() as live:
        experts(*given).sum().backward()
    assert live.peak < sizes * 4 / 3
    assert all(parameter.grad.is_contiguous() for parameter in experts.parameters())


class Largest(TorchDispatchMode):
    """The most float32 elements of one tensor, and of how many bytes operations made results."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self.bytes += tensor.nbytes
                if tensor.dtype == torch.float32:
                    self.elements = max(self.elements, tensor.numel())
        return out


def test_float32_sums_of_one_expert_at_a_time() -> None:
    """Never all [E, ...] in float32, and of an expert that no token chose nothing but its zeros."""
    experts = tile_model(experts_of("mixtral", dtype=torch.bfloat16), tiling=Tiling(shard_tokens=2))
    x, index, weights = choice(16, dtype=torch.bfloat16)
    with Largest() as all_experts:
        experts(x, index, weights).sum().backward()
    assert (
        all_experts.elements == 2 * I * H
    )  # gate and up of one expert: less than the [16, H] of x's gradient in all shards
    with Largest() as two_experts:
        experts(x, index % 2, weights).sum().backward()
    assert two_experts.bytes < all_experts.bytes


def test_bf16_is_no_worse_than_untiled() -> None:
    """At 256 shards, where sums in bf16 would be ten times off; against float64 on the same values."""
    experts = experts_of("mixtral", dtype=torch.bfloat16)
    x, index, weights = choice(1024, dtype=torch.bfloat16)
    truth = gradients(copy.deepcopy(experts).double(), x.double().detach().requires_grad_(), index,
                      weights.double().detach().requires_grad_())  # fmt: skip
    untiled = gradients(experts, x, index, weights)
    tiled = gradients(tile_model(experts, num_shards=256), x, index, weights)
    for ours, theirs, true in zip(tiled, untiled, truth, strict=True):
        error = relative_error(ours.double().numpy(), true.numpy())
        assert error <= BF16_256_SHARDS * relative_error(theirs.double().numpy(), true.numpy())


def test_one_gradient_for_each_parameter() -> None:
    experts, given = tile_model(experts_of("mixtral"), num_shards=8), choice(40)
    fired: list[str] = []
    for name, parameter in experts.named_parameters():
        parameter.register_hook(lambda gradient, name=name: fired.append(name))
    experts(*given).sum().backward()
    assert sorted(fired) == ["down_proj", "gate_up_proj"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_main_grad(dtype: torch.dtype) -> None:
    """Gradients go to the buffers of a training framework, added up over backwards."""
    experts, given = experts_of("gpt_oss", dtype=dtype), choice(20, dtype=dtype)
    expected = gradients(tile_model(experts, num_shards=3), *given)[3:]
    for parameter in experts.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
    torch.manual_seed(2)
    dy = torch.randn((20, H), dtype=torch.float64).to(dtype)
    for _ in range(2):
        experts(*given).backward(dy)
    limit = DISTRIBUTED_FLOAT64 if dtype == torch.float64 else 2 * torch.finfo(dtype).eps
    for parameter, gradient in zip(experts.parameters(), expected, strict=True):
        assert parameter.grad is None
        assert relative_error(parameter.main_grad.double().numpy(), 2 * gradient.double().numpy()) <= limit


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_transformers_implementations(implementation: str) -> None:
    """All compute the formula that tiled experts compute; under autocast each in the dtype in which it does."""
    experts, given = experts_of("gpt_oss", implementation, torch.float32), choice(30, dtype=torch.float32)
    expected = gradients(experts, *given)
    with torch.autocast("cpu", torch.bfloat16):
        cast = gradients(experts, *given)
    tile_model(experts, num_shards=4)
    assert_same(gradients(experts, *given), expected, MODEL_FLOAT32)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(experts, *given)
    assert_same(found, cast, MODEL_FLOAT32 if implementation == "grouped_mm" else 3 * torch.finfo(torch.bfloat16).eps)
    assert tiling_paths(experts) == {"": "tiled_experts"}


def test_a_kernel_of_somebody_is_called() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward

    calls = []

    def counted(self: Any, *args: Any) -> Tensor:
        calls.append(len(args[0]))
        return batched_mm_experts_forward(self, *args)

    ALL_EXPERTS_FUNCTIONS.register("counted", counted)
    experts, given = experts_of("mixtral", "counted"), choice(12)
    expected = gradients(experts, *given)
    assert_same(gradients(tile_model(experts, num_shards=3), *given), expected)
    assert tiling_paths(experts) == {"": "tile: experts_implementation is counted"}
    assert set(calls[1:]) == {2, 4}  # of the probe, and of a shard


class LowRank(nn.Module):
    """What peft puts on a parameter of experts: it frozen, and two small ones beside it."""

    def __init__(self, whole: Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(E, 2, whole.shape[2], dtype=whole.dtype) / 4)
        self.b = nn.Parameter(torch.randn(E, whole.shape[1], 2, dtype=whole.dtype) / 4)

    def forward(self, whole: Tensor) -> Tensor:
        return whole + self.b @ self.a


@pytest.mark.parametrize("first", ["tiled", "adapted"])
def test_low_rank_parts_of_weights(first: str) -> None:
    experts, given = experts_of("mixtral"), choice(20)
    if first == "tiled":
        tile_model(experts, num_shards=4)
    torch.manual_seed(3)
    parametrize.register_parametrization(experts, "gate_up_proj", LowRank(experts.gate_up_proj))
    experts.requires_grad_(False)
    experts.parametrizations.requires_grad_(True)
    experts.parametrizations.gate_up_proj.original.requires_grad_(False)
    plain = experts_of("mixtral")
    torch.manual_seed(3)
    parametrize.register_parametrization(plain, "gate_up_proj", LowRank(plain.gate_up_proj))
    plain.requires_grad_(False)
    plain.parametrizations.gate_up_proj[0].requires_grad_(True)
    if first == "adapted":
        tile_model(experts, num_shards=4)
    assert_same(gradients(experts, *given), gradients(plain, *given))
    assert tiling_paths(experts) == {"": "tiled_experts"}


def test_what_is_more_than_the_formula_is_said() -> None:
    experts, given = experts_of("mixtral"), choice(12)
    expected = gradients(experts, *given)
    tile_model(experts, num_shards=3)
    experts.act_fn.register_forward_hook(lambda *args: None)
    assert_same(gradients(experts, *given), expected)
    assert tiling_paths(experts) == {"": "tile: act_fn has hooks"}
    experts.act_fn._forward_hooks.clear()
    experts.scale = nn.Buffer(torch.ones(1))
    gradients(experts, *given)
    assert tiling_paths(experts) == {"": "tile: it has scale"}


def test_weights_of_dbrx_that_zero_3_gathers_are_left() -> None:
    """Where its engine looks for them is the forward of DBRX itself."""
    experts, (x, index, weights) = experts_of("dbrx"), choice(12)
    x = x.detach().view(2, 6, H).requires_grad_()
    expected = gradients(experts, x, index, weights)
    tile_model(experts, num_shards=3)
    experts.mlp.ds_id = 0
    assert_same(gradients(experts, x, index, weights), expected)
    assert tiling_paths(experts) == {"": "untiled: ZeRO-3 gathers its weights"}


@pytest.mark.parametrize(
    ("name", "said"), [("mlp", "mlp has hooks"), ("mlp.activation_fn", "mlp.activation_fn has hooks")]
)
def test_parts_of_dbrx_that_are_more_are_called(name: str, said: str) -> None:
    experts, (x, index, weights) = experts_of("dbrx"), choice(12)
    experts.get_submodule(name).register_forward_hook(lambda _, __, result: 2 * result)
    x = x.detach().view(2, 6, H).requires_grad_()
    expected = gradients(experts, x, index, weights)
    assert_same(gradients(tile_model(experts, num_shards=3), x, index, weights), expected)
    assert tiling_paths(experts) == {"": f"tile: {said}"}
    with pytest.raises(AssertionError):  # the hook is seen
        assert_same(gradients(experts_of("dbrx"), x, index, weights), expected)


def test_a_forward_that_was_replaced_is_refused() -> None:
    experts = experts_of("mixtral")
    experts.forward = lambda *args: args[0]
    before = type(experts)
    with pytest.raises(UnsupportedError, match=r"that can be tiled, got MixtralExperts; its forward is <lambda>\. "):
        tile_model(experts)
    assert type(experts) is before


def test_a_subclass_that_computes_otherwise_is_not_taken_for_its_parent() -> None:
    experts = experts_of("mixtral")

    class Other(type(experts)):  # type: ignore[misc]
        def forward(self, *args: Any) -> Any:
            return 2 * super().forward(*args)

    experts.__class__ = Other
    with pytest.raises(UnsupportedError, match=r"that can be tiled, got Other\. "):
        tile_model(experts)


def test_second_derivatives_are_refused() -> None:
    experts, (x, index, weights) = tile_model(experts_of("mixtral"), num_shards=2), choice(8)
    with pytest.raises(UnsupportedError, match="create_graph must be False"):
        torch.autograd.grad(experts(x, index, weights).sum(), x, create_graph=True)


def test_a_memory_budget() -> None:
    """For the rows of one expert, all of one shard."""
    experts, given = experts_of("mixtral"), choice(64)
    expected = gradients(experts, *given)
    assert_same(gradients(tile_model(experts, tiling=Tiling(memory_budget=20_000)), *given), expected)
    with pytest.raises(SpecError, match="memory_budget must be >= "):
        tile_model(experts, tiling=Tiling(memory_budget=10))(*given)


# PyTorch's first forward-mode derivative scripts formulas of its own.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode() -> None:
    from torch.autograd import forward_ad

    experts, (x, index, weights) = experts_of("mixtral"), choice(10)
    experts.requires_grad_(False)
    x, weights, tangent = x.detach(), weights.detach(), torch.randn(10, H, dtype=torch.float64)
    found = []
    for run in (experts, tile_model(copy.deepcopy(experts), num_shards=3)):
        with forward_ad.dual_level():
            found.append(forward_ad.unpack_dual(run(forward_ad.make_dual(x, tangent), index, weights)).tangent)
    assert_same([found[1]], [found[0]])
