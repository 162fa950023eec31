"""`parallelize` of any model of transformers: sharded, recomputed and compiled layer by layer, as one process computes it."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from shared_specs import UnsupportedError
from shared_specs.config import Checkpointing, ParallelConfig, TensorParallel
from shared_specs.tolerances import MODEL_FLOAT32
from tests.models.supported import IMAGES, TEXT, build
from tests.models.test_torch_supported import REPRESENTATIVE
from tests.models.tiny_overrides import INPUTS, NOT_BUILT
from tests.ranks import Ranks
from tiled_torch.parallel import apply_checkpointing, parallelize
from tiled_torch.plans.any_model import structural_plan
from tiled_torch.plans.data import placement_of
from tiled_torch.plans.registry import Plan, plan_of

pytestmark = pytest.mark.ranks
SHARDED = "tests.plans.ranks_torch_structure:sharded"
# Whose layers are in several lists, or are not called in backward.
WITHOUT = frozenset({"xlm", "reformer"})
# Whose classes name no layers: those that transformers checkpoints, or the only list.
UNNAMED = "blenderbot electra ctrl".split()
# Of images and text: one tower, several, a list of layers of two kinds.
WITH_IMAGES = "gemma3 idefics2 llama4 mllama qwen3_vl_moe".split()


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


def check(answers: list[dict[str, dict[str, Any]]], *, recomputed: bool = True) -> None:
    """Losses and gradients are those of one process; every layer that shares no weights is a unit, beside the rest, and every
    one is recomputed."""
    for found in answers:
        for kind, one in found.items():
            assert one["loss"] <= MODEL_FLOAT32, kind
            assert one["gradients"] <= MODEL_FLOAT32, kind
            assert one["units"] == one["layers"] - one["sharing"] + 1, kind
            assert one["recomputed"] == (one["layers"] if recomputed else 0), kind


def test_models_of_different_structure(two):
    """Experts; parallel branches with fused projections."""
    answers = two.run(SHARDED, kinds=["mixtral", "gpt_neox"])
    check(answers)
    assert {"tiled_experts", "tiled_linear_cross_entropy"} <= {*answers[0]["mixtral"]["paths"].values()}


def test_positions_are_made_once_and_keep_their_dtype(two):
    """Each layer's unit would round those that some models make in float32, and all layers keep what they are given."""
    for found in two.run("tests.plans.ranks_torch_structure:in_16_bits", kinds=["olmo2", "ernie4_5", "llama"]):
        assert {kind: one["dtypes"] for kind, one in found.items()} == {
            "olmo2": ["torch.float32"],
            "ernie4_5": ["torch.float32"],
            "llama": ["torch.bfloat16"],
        }
        assert {one["tensors"] for one in found.values()} == {2}
        assert all(one["same"] for one in found.values()), found


def test_other_inputs_of_blocks_have_the_dtype_of_the_products(two):
    assert two.run("tests.plans.ranks_torch_structure:wide_inputs") == ["torch.bfloat16"] * 2


def test_layers_that_share_weights(two):
    """Of Zamba all that attend have one transformer."""
    answers = two.run(SHARDED, kinds=["zamba"])
    check(answers)
    assert [(found["zamba"]["layers"], found["zamba"]["sharing"]) for found in answers] == [(4, 2)] * 2


@pytest.mark.deep
def test_other_settings(two):
    """Untiled, whole layers tiled, inputs in host memory, products kept, layers compiled, DistributedDataParallel."""
    check(two.run(SHARDED, kinds=["bloom"], scope=None))
    check(two.run(SHARDED, kinds=["bloom"], checkpointing="offload"))
    check(two.run(SHARDED, kinds=["bloom"], checkpointing="products"))
    check(two.run(SHARDED, kinds=["gpt_neox"], checkpointing="none", compiled=True), recomputed=False)
    for found in two.run(SHARDED, kinds=["granite"], scope="block"):
        assert found["granite"]["gradients"] <= MODEL_FLOAT32
        assert found["granite"]["recomputed"] == 0  # they are their own checkpoints
    for found in two.run(SHARDED, kinds=["bloom"], engine="ddp"):
        assert found["bloom"]["gradients"] <= MODEL_FLOAT32


@pytest.mark.deep
def test_layers_that_are_no_tiled_blocks_are_recomputed_beside_those_that_are(two):
    """Of a model of images and text scope="block" tiles the layers of text."""
    for found in two.run(SHARDED, kinds=["gemma3"], images=True, scope="block"):
        one = found["gemma3"]
        blocks = [name for name, path in one["paths"].items() if path == "tiled_block" and not name.endswith("mlp")]
        assert one["gradients"] <= MODEL_FLOAT32
        assert (len(blocks), one["recomputed"], one["layers"]) == (2, 2, 4), one


@pytest.mark.deep
def test_towers_are_sharded_and_recomputed_as_well(two):
    check(two.run(SHARDED, kinds=WITH_IMAGES, images=True))


@pytest.mark.deep
def test_representative_models(two):
    check(two.run(SHARDED, kinds=[kind for kind in REPRESENTATIVE if kind not in {*INPUTS, *WITHOUT}]))


@pytest.mark.deep
def test_models_that_do_not_name_their_layers(two):
    check(two.run(SHARDED, kinds=UNNAMED))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(4))
def test_every_model(part, two):
    """But those whose layers are not known, which are one unit."""
    kinds = [kind for kind in TEXT if kind not in {*INPUTS, *NOT_BUILT}]
    assert len(kinds) - len(WITHOUT) >= 170
    for kind in kinds[part::4]:
        if kind in WITHOUT:
            assert isinstance(structural_plan(build(kind)), str)
        else:
            check(two.run(SHARDED, kinds=[kind]))


class Own(torch.nn.Module):
    pass


WITHOUT_LAYERS: dict[str, tuple[Any, str]] = {
    "of others": (Own, "It is no model of transformers."),
    "several lists": (lambda: build("xlm"), "XLMWithLMHeadModel has no list of layers."),
    "reversible": (
        lambda: build("reformer"),
        "Layers of ReformerModelWithLMHead are not called in backward, but parts of them.",
    ),
}


@pytest.mark.parametrize("case", WITHOUT_LAYERS)
def test_a_model_whose_layers_are_not_known_is_not_checkpointed(case):
    make, reason = WITHOUT_LAYERS[case]
    advice = f"{reason} Tell where they are with tiled_torch.parallel.register_plan."
    said = "must be None for a model whose layers are not known, got Checkpointing."
    model, checkpointing = make(), Checkpointing()
    for function, run in (
        ("parallelize", lambda: parallelize(model, None, ParallelConfig(checkpointing=checkpointing))),
        ("apply_checkpointing", lambda: apply_checkpointing(model, checkpointing)),
    ):
        with pytest.raises(UnsupportedError) as caught:
            run()
        assert str(caught.value) == f"{function}: config.checkpointing {said} {advice}"


def test_a_model_whose_layers_are_not_known_is_one_unit(two):
    """With one warning, of the first rank."""
    answers = two.run(SHARDED, kinds=["xlm", "reformer"], checkpointing="none")
    for found in answers:
        for kind, one in found.items():
            assert max(one["loss"], one["gradients"]) <= MODEL_FLOAT32, kind
            assert (one["units"], one["recomputed"]) == (1, 0), kind
    told = [found["xlm"]["told"] for found in answers]
    assert told == [
        [
            "parallelize: XLMWithLMHeadModel has no list of layers. So the model is one unit: each rank gathers all of its "
            "weights for the whole step. Tell where they are with tiled_torch.parallel.register_plan."
        ],
        [],
    ]


def test_a_model_around_one_of_transformers_is_refused():
    """As peft's are, which say the configuration of what they hold."""

    class Around(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = build("mixtral")
            self.config = self.inside.config

        def get_base_model(self):
            return self.inside

    match = r"^parallelize: model must be the MixtralForCausalLM in it, got Around\. Pass what its get_base_model\(\)"
    with pytest.raises(UnsupportedError, match=match):
        plan_of(Around())


def test_the_lists_of_a_model_of_images_and_text():
    assert IMAGES["gemma3"]
    model = build("gemma3", images=True)
    found = structural_plan(model)
    assert isinstance(found, Plan)
    assert (found.blocks, len(found.towers)) == ("model.language_model.layers", 1)
    assert [len(layers) for layers in found.lists_of(model)] == [2, 2]
    assert found.styles is None
    assert found.context is None


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [((8, 12, 6), 4, None), ((8, 12, 6), 12, 1), ((3, 12, 6), 2, 1), ((3, 7, 6), 2, None), ((3, 12), 2, None)],
)
def test_experts_are_cut_into_equal_parts(shape, ranks, dim):
    """Where FSDP's first dim, the experts, would leave some ranks without any."""
    found = placement_of(torch.nn.Parameter(torch.empty(shape)), ranks)
    assert (None if found is None else found.dim) == dim


def test_experts_fewer_than_ranks_can_share(two):
    options = {"names": ["fsdp", "fsdp, inputs offloaded"], "kind": "mixtral", "tiled": True, "num_local_experts": 3}
    for found in two.run("tests.plans.ranks_torch_plans:models", **options):
        assert max(one[name] for one in found.values() for name in ("loss", "gradients")) <= MODEL_FLOAT32


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_are_not_split(kind):
    with pytest.raises(UnsupportedError, match=r"^parallelize: config\.tensor must be None for a model with experts"):
        plan_of(model := build(kind)).check(model, TensorParallel(), 2)
