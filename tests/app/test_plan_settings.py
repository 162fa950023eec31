"""What `plan` says to set is what the halves take: every recommendation for every model it knows, on 1, 8 and 32 GPUs."""

from collections.abc import Iterator

import pytest

from shared_specs.app.options import InputError
from shared_specs.app.plan.decoder import MODELS, check_planned
from shared_specs.app.plan.search import memory_of, plan
from shared_specs.app.plan.setting import Setting
from shared_specs.app.plan.show import what_to_set
from shared_specs.config import HALVES, Half
from shared_specs.plans.checks import TensorSizes, check_context_heads, check_divides, check_parallel_config

TOKENS = 131072


def recommended(name: str, half: Half) -> Iterator[Setting]:
    """Every setting that a plan of 131072 tokens names: the one to take, and those of the longest contexts."""
    for gpus in (1, 8, 32):
        for gpu in ("h100", "b200"):
            try:
                check_planned(MODELS[name], half, gpus)
            except InputError:
                continue
            found = plan(MODELS[name], TOKENS, memory=memory_of(gpu, "--gpu")[0], gpus=gpus, half=half)
            yield from (found.setting,) if found.setting is not None else ()
            yield from (reach.setting for reach in found.reach)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", MODELS)
def test_every_recommendation_is_a_configuration_that_the_half_takes(name: str, half: Half) -> None:
    """`parallelize` accepts it, its sizes divide the model's, and what the table says is what was chosen."""
    decoder = MODELS[name]
    settings = list(dict.fromkeys(recommended(name, half)))
    assert settings, "no context of any length fits"
    for setting in settings:
        config = check_parallel_config("parallelize", setting.config, setting.axes, half, unsupported_in(half))
        assert setting.tokens % (setting.context * setting.tensor) == 0
        even = {"heads": decoder.heads, "kv_heads": decoder.kv_heads, "intermediate_size": decoder.intermediate}
        check_divides("parallelize", TensorSizes(even=even, vocab=decoder.vocab), "tp", setting.tensor)
        check_context_heads("parallelize", decoder.heads, {"tp": setting.tensor, "cp": setting.exchanging})
        said = dict(what_to_set(setting))
        assert ("cpu_offload=True" in said.get("DataParallel", "")) == (
            config.data is not None and config.data.cpu_offload
        )
        assert ("TensorParallel" in said) == (config.tensor is not None)


def unsupported_in(half: Half) -> dict[str, str | None]:
    return {"data.cpu_offload": "A compiled step reads its parameters from the devices."} if half == "jax" else {}
