"""`finetune --plan`: what is set in a run, and which runs cannot be planned."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from shared_specs.app.options import FinetuneOptions, InputError
from shared_specs.app.plan import run as run_plan
from shared_specs.app.plan.decoder import MODELS
from shared_specs.app.plan.run import planned_run
from shared_specs.kernels.roofline import GPUS


@pytest.fixture
def default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration of the default model, which is not installed everywhere."""
    sizes = MODELS["smollm2-135m"]
    config = {
        "model_type": "llama",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab,
        "tie_word_embeddings": sizes.tied,
    }
    monkeypatch.setattr(run_plan, "read_model", lambda _: SimpleNamespace(config=config))


@pytest.mark.usefixtures("default_model")
@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({"tokens": 512}, {"plain": True, "checkpointing": True, "cp": 1, "fsdp": 1}),
        ({"tokens": 2**15, "plan": "10GB"}, {"plain": False, "scope": "mlp", "checkpointing": True}),
        ({"tokens": 2**15, "plan": "8GB"}, {"scope": "block", "checkpointing": False, "offload": False}),
        (
            {"tokens": 3 * 2**15, "fsdp": 3, "batch": 3, "device": "gpu", "plan": "7GB"},
            {"fsdp": 3, "cp": 1, "offload": True},
        ),
        ({"tokens": 3 * 2**15, "cp": 3, "device": "gpu", "plan": "7GB"}, {"fsdp": 1, "cp": 3, "context": "ulysses"}),
        ({"tokens": 2**16, "cp": 2, "device": "gpu", "plan": "7GB"}, {"fsdp": 1, "cp": 2, "context": "ring"}),
        ({"tokens": 3 * 2**17, "cp": 6, "device": "gpu", "plan": "7GB"}, {"fsdp": 1, "cp": 6, "context": "2d"}),
        ({"tokens": 2**15, "tp": 3, "plan": "8GB"}, {"fsdp": 1, "cp": 1, "tp": 3, "scope": "block", "plain": False}),
        ({"tokens": 3 * 2**15, "cp": 3, "device": "gpu", "plan": "5GB"}, {"tp": 3, "cp": 1, "scope": "block"}),
    ],
)
def test_a_run_is_planned(given: dict[str, Any], chosen: dict[str, Any]) -> None:
    """Of SmolLM2-135M: as little as is needed, and the ranks that were named."""
    base: dict[str, Any] = {"plan": "16GB", "device": "cpu"}
    options, said = planned_run(FinetuneOptions(**base | given), "torch")
    options.check()
    assert {name: getattr(options, name) for name in chosen} == chosen
    assert options.ranks == FinetuneOptions(**given).ranks
    assert said[0].startswith(f"plan: --fsdp {options.fsdp} --cp {options.cp} --scope {options.scope}")
    assert "reserve 3.0 GiB" in said[1]
    assert planned_run(FinetuneOptions(tokens=64), "jax") == (FinetuneOptions(tokens=64), ())


@pytest.mark.usefixtures("default_model")
@pytest.mark.parametrize(("cp", "tokens", "memory", "kind"), [(2, 2**16, "9GB", "ring"), (6, 3 * 2**17, "7.8GB", "2d")])
def test_a_run_in_jax_is_planned_as_a_ring(cp: int, tokens: int, memory: str, kind: str) -> None:
    """Where the ranks do not divide the nine heads; nothing is untiled there."""
    options, said = planned_run(FinetuneOptions(tokens=tokens, cp=cp, device="gpu", plan=memory), "jax")
    options.check()
    chosen = (options.fsdp, options.cp, options.context, options.scope, options.offload)
    assert chosen == (1, cp, kind, "block", True)
    assert f"--context {kind}" in said[0]


@pytest.mark.usefixtures("default_model")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scope": "block"}, "finetune: --plan chooses --scope itself. Drop one of the two."),
        ({"cp": 2, "context": "ring"}, "finetune: --plan chooses --context itself. Drop one of the two."),
        (
            {"tp": 2},
            "finetune: --tp must divide the model's 9 heads, 3 key-value heads and 1536 features of an MLP, got 2.",
        ),
        (
            {"plan": "h300"},
            f"finetune: --plan must be one of {', '.join(GPUS)}, or a size such as 80GB, got h300.",
        ),
        ({"plan": "3GB"}, "finetune: --plan finds no way to fit a step into 3GB."),
    ],
)
def test_a_run_that_cannot_be_planned(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        planned_run(FinetuneOptions(**{"plan": "16GB", "device": "cpu"} | given), "torch")


@pytest.mark.usefixtures("default_model")
def test_a_run_in_jax_that_cannot_be_planned() -> None:
    with pytest.raises(InputError, match=r"^finetune: the devices must divide the model's 576 hidden .*, got 5\. "):
        planned_run(FinetuneOptions(fsdp=5, plan="h100"), "jax")
    with pytest.raises(
        InputError, match=r"^finetune: --tp must divide the model's 9 heads, 3 key-value heads and .*, got 2"
    ):
        planned_run(FinetuneOptions(tp=2, plan="h100"), "jax")
