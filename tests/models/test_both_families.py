"""Every family of decoder against transformers' own model, in float64, from the folder that it saves."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from shared_specs import Tiling
from shared_specs.app.models.weights import read_model
from shared_specs.tolerances import FLOOR
from tests.asserting import assert_within
from tests.models.exact_transformers import exact_model
from tests.models.families import FAMILIES, VOCAB
from tests.tiny_model import tiny_tokenizer
from tiled_jax.models import Llama, LlamaConfig, from_hf, generate, to_hf

BATCH, TOKENS, NEW, PADDING = 3, 12, 6, 5


class Pair(NamedTuple):
    """transformers' model, and ours of the folder that it wrote: its graph and parameters."""

    theirs: Any
    graph: Any
    parameters: nnx.State


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, a mask with padding in front of one sequence and behind another, and labels without it and without a prompt.

    Nor is there a label for the first token behind padding: what that predicts is each implementation's own matter.
    """
    ids = np.random.default_rng(0).integers(1, VOCAB, (BATCH, TOKENS)).astype(np.int32)
    mask = np.ones_like(ids)
    mask[0, :PADDING] = mask[1, -PADDING:] = 0
    labels = np.where(mask == 1, ids, -100)
    labels[0, PADDING] = labels[2, :4] = -100
    return ids, mask, labels


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest, float64: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pair:
    theirs = exact_model(monkeypatch, request.param)
    theirs.save_pretrained(tmp_path)
    tiny_tokenizer().save(tmp_path)
    files = read_model(tmp_path)
    config = LlamaConfig.from_hf(files.config)
    tiling = Tiling(shard_tokens=5)
    build = lambda: Llama(config, tiling=tiling, dtype="float64", rngs=nnx.Rngs(0))  # noqa: E731
    graph, parameters = nnx.split(nnx.eval_shape(build))
    return Pair(theirs, graph, from_hf(parameters, files.tensors))


@pytest.mark.deep_but(1)
def test_logits_loss_gradients_and_greedy_tokens_are_those_of_transformers(pair: Pair, tmp_path: Path) -> None:
    ids, mask, labels = inputs()
    given = {name: torch.from_numpy(a).long() for name, a in (("input_ids", ids), ("attention_mask", mask))}
    result = pair.theirs(**given, labels=torch.from_numpy(labels).long(), use_cache=False)
    result.loss.backward()

    def run(p: nnx.State) -> Any:
        loss = lambda p: nnx.merge(pair.graph, p)(ids, attention_mask=mask, labels=labels)  # noqa: E731
        return nnx.merge(pair.graph, p)(ids, attention_mask=mask), *jax.value_and_grad(loss)(p)

    ids, mask, labels = map(jnp.asarray, (ids, mask, labels))
    logits, loss, gradients = jax.jit(run)(pair.parameters)
    seen = np.asarray(mask) == 1
    assert_within(np.asarray(logits)[seen], result.logits.detach().numpy()[seen], FLOOR["float64"], "logits")
    assert_within(np.asarray(loss), result.loss.detach().numpy(), FLOOR["float64"], "loss")
    assert_greedy_tokens(pair)
    expected = saved_gradients(pair.theirs, tmp_path)
    found = to_hf(gradients)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_within(found[name], gradient, FLOOR["float64"], name)


def assert_greedy_tokens(pair: Pair) -> None:
    """Prompts of two lengths, longer than the windows."""
    ids, mask, _ = (a[:2] for a in inputs())
    mask[1] = 1
    ids = np.where(mask == 1, ids, 0).astype(np.int32)
    given = {name: torch.from_numpy(a).long() for name, a in (("inputs", ids), ("attention_mask", mask))}
    stop = {"eos_token_id": None, "pad_token_id": 0}
    expected = pair.theirs.eval().generate(**given, max_new_tokens=NEW, do_sample=False, **stop)
    model = nnx.merge(pair.graph, pair.parameters)
    found = generate(model, jnp.asarray(ids), NEW, attention_mask=jnp.asarray(mask))
    np.testing.assert_array_equal(np.asarray(found), expected.numpy())


def saved_gradients(model: Any, folder: Path) -> dict[str, np.ndarray]:
    """Gradients under the names and in the layouts in which transformers saves its weights."""
    from safetensors.numpy import load_file

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder / "gradients")
    return load_file(folder / "gradients" / "model.safetensors")
