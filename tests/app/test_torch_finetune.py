"""The PyTorch command: a tiny Llama trained, saved, loaded by transformers, resumed; GGUF against transformers' reader."""

import io
import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared_specs.app.command import main
from shared_specs.app.data.batches import Batch
from shared_specs.app.finetune.checkpoint import load_checkpoint, save_sharded_checkpoint
from shared_specs.app.finetune.log import read_log, step_records
from shared_specs.app.finetune.loop import MODEL_NAME, finetune
from shared_specs.app.finetune.plain_memory import plain_step
from shared_specs.app.finetune.processes import ALONE, OutputError
from shared_specs.app.finetune.trainer import ADAMW
from shared_specs.app.models.model_config import scale_positions
from shared_specs.app.models.weights import default_model, read_model
from shared_specs.app.options import FinetuneOptions, InputError
from shared_specs.errors import UnsupportedError
from shared_specs.tolerances import DEMO_LOSS_RTOL, MODEL_FLOAT32
from tests.installed import hinted, run_with
from tests.synced import Renames, assert_synced_before_the_name, longest_file
from tests.tiny_model import MIXTRAL, tiny_config, tiny_weights, write_inputs, write_tiny_folder, write_tiny_gguf
from tiled_torch.__main__ import COMMANDS
from tiled_torch.commands.finetune.processes import TorchTeam
from tiled_torch.commands.finetune.trainer import TorchTrainer, build_model

CPU = torch.device("cpu")
OPTIONS = {"tokens": 48, "steps": 4, "batch": 2, "lr": 1e-3, "device": "cpu"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def options(inputs, tmp_path):
    def make(**changes):
        given = {"model": str(inputs / "model"), "text": str(inputs / "text"), "out": str(tmp_path / "run")}
        return FinetuneOptions(**OPTIONS | given | changes)

    return make


@pytest.fixture(scope="module")
def plain_losses(inputs, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("plain") / "run")
    return run(FinetuneOptions(**OPTIONS, model=str(inputs / "model"), text=str(inputs / "text"), out=out, plain=True))


def run(options):
    assert finetune(TorchTrainer(), options, Console(file=io.StringIO())) == 0
    return [record["loss"] for record in step_records(read_log(Path(options.out)))]


def windows(seed=0, shape=(2, 49)):
    return np.random.default_rng(seed).integers(0, 272, size=shape, dtype=np.int32)


def loaded(options, **config):
    trainer = TorchTrainer()
    trainer.load(tiny_config(**config), tiny_weights(tiny_config(**config)), options)
    return trainer


@pytest.mark.parametrize("tied", [True, False])
def test_model_is_transformers_own(options, tied):
    config = tiny_config(tie_word_embeddings=tied)
    weights = tiny_weights(config)
    model = build_model(config, weights, CPU)
    assert dict(model.named_parameters()).keys() == weights.keys()
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    before = weights["model.norm.weight"].copy()
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    np.testing.assert_array_equal(weights["model.norm.weight"], before)  # copied, not shared


def test_step_is_adamw_on_the_mean_cross_entropy(options):
    """Against the update written out by hand."""
    trainer = loaded(options(plain=True))
    tokens = torch.from_numpy(windows()).long()
    model = build_model(tiny_config(), tiny_weights(tiny_config()), CPU)
    logits = model(input_ids=tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    expected.backward()
    assert trainer.step(Batch.of_windows(windows())) == pytest.approx(expected.item(), rel=MODEL_FLOAT32)
    state = trainer.state()
    assert state.optimizer["step"] == 1
    for name, weight in model.named_parameters():
        m = (1 - ADAMW.beta1) * weight.grad
        v = (1 - ADAMW.beta2) * weight.grad**2
        step = (m / (1 - ADAMW.beta1)) / ((v / (1 - ADAMW.beta2)).sqrt() + ADAMW.eps)
        for found, wanted in (
            (state.optimizer[f"m.{name}"], m),
            (state.optimizer[f"v.{name}"], v),
            (state.weights[name] - tiny_weights(tiny_config())[name], -1e-3 * step),
        ):
            assert relative(found, wanted.detach().numpy()) < 10 * MODEL_FLOAT32, name


def relative(found, wanted):
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def test_state_goes_round(options):
    first = loaded(options(plain=True))
    for seed in range(2):
        first.step(Batch.of_windows(windows(seed)))
    second = loaded(options(plain=True))
    second.load_state(first.state())
    for seed in range(2, 4):
        assert first.step(Batch.of_windows(windows(seed))) == second.step(Batch.of_windows(windows(seed)))
    for name, array in first.state().optimizer.items():
        np.testing.assert_array_equal(array, second.state().optimizer[name], err_msg=name)


@pytest.mark.parametrize(
    "changes",
    [
        {"shard_tokens": 7},
        {"memory_budget": 100_000},
        {"num_shards": 4, "keep": 0.5, "checkpointing": True},
        {"plain": True, "checkpointing": True},
        {},
    ],
    ids=str,
)
def test_same_losses_as_plain(options, plain_losses, changes):
    assert plain_losses[-1] < plain_losses[0]
    assert run(options(**changes)) == pytest.approx(plain_losses, rel=DEMO_LOSS_RTOL)


def test_checkpointing_recomputes_layers(options):
    """Fewer bytes are held for backward; the losses alone would not show whether the option did anything."""

    def held(**changes):
        trainer, total = loaded(options(plain=True, **changes)), 0

        def count(tensor):
            nonlocal total
            total += tensor.nbytes
            return tensor

        ids = torch.from_numpy(windows()).long()
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            trainer._loss(ids[:, :-1], ids[:, 1:])
        return total

    assert held(checkpointing=True) < 0.5 * held()


@pytest.mark.parametrize(
    "changes", [{"plain": True}, {"checkpointing": True}, {"scope": "block"}], ids=["plain", "checkpointed", "block"]
)
def test_layers_are_told_of(options, changes):
    """Each layer's forward, and the backward of all but the first."""
    told = []
    trainer = loaded(options(**changes), num_hidden_layers=3)
    trainer.watch(lambda phase, layers: told.append((phase, layers)))
    trainer.step(Batch.of_windows(windows()))
    assert told == [("forward", 3)] * 3 + [("backward", 3)] * 2
    assert trainer._model.model.layers[0].mlp._forward_hooks == {}  # hooks there would end the tiled form


@pytest.mark.parametrize(("layers", "kind"), [(1, {}), (3, {}), (2, MIXTRAL | {"sliding_window": None})], ids=str)
def test_plain_memory_formula_counts_what_autograd_keeps(options, layers, kind):
    changes = kind | {"num_hidden_layers": layers, "intermediate_size": 96}
    config, trainer = tiny_config(**changes), loaded(options(plain=True), **changes)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in trainer._model.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in parameters and tensor.numel() > 1:
            kept[storage.data_ptr()] = storage  # held, so that no address comes twice
        return tensor

    ids = torch.from_numpy(windows()).long()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        trainer._loss(ids[:, :-1], ids[:, 1:])
    step = plain_step(config, 2 * 48)
    rotation = 2 * 48 * config["head_dim"] * 4  # cosine and sine are kept once for the batch
    log_probabilities = step.logits
    assert sum(storage.nbytes() for storage in kept.values()) == step.activations + log_probabilities - rotation
    assert step.weights == sum(parameter.nbytes for parameter in trainer._model.parameters())


def test_bfloat16_computes_in_bfloat16_and_keeps_float32(options, tmp_path):
    exact = run(options(plain=True, out=str(tmp_path / "exact")))
    rounded = run(options(plain=True, dtype="bfloat16"))
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=100 * DEMO_LOSS_RTOL)
    saved = read_model(tmp_path / "run" / MODEL_NAME).tensors["model.layers.0.mlp.up_proj.weight"]
    assert (saved.view(np.uint32) & 0xFFFF).any()  # more bits than a bfloat16 has


def test_transformers_loads_the_result(options, tmp_path):
    trainer = TorchTrainer()
    finetune(trainer, options(plain=True, rope_scale=2.0, tokens=100), Console(file=io.StringIO()))
    folder = tmp_path / "run" / MODEL_NAME
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert model.config.rope_parameters == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ids = torch.from_numpy(windows(shape=(1, 100))).long()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, trainer._model(ids).logits, rtol=0, atol=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "the sun on 42 tiles"
    assert tokenizer(text).input_ids == read_model(folder).tokenizer.encode(text).tolist()
    assert tokenizer.eos_token == "<|end|>"
    checkpoint = next((tmp_path / "run" / "checkpoints").iterdir())
    assert not any(AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)[1].values())


def test_linear_scaling_divides_the_positions():
    model = build_model(tiny_config(), tiny_weights(tiny_config()), CPU)
    scaled = build_model(scale_positions(tiny_config(), 4.0), tiny_weights(tiny_config()), CPU)
    assert torch.equal(scaled.model.rotary_emb.inv_freq * 4, model.model.rotary_emb.inv_freq)


def test_resumed_run_has_the_losses_of_the_uninterrupted_one(options, tmp_path):
    whole = run(options(num_shards=3, out=str(tmp_path / "whole")))
    run(options(num_shards=3, steps=2))
    assert run(options(num_shards=3, resume=True)) == whole


def shards_of(options):
    """What saves the shards of a trainer that has taken a step into a checkpoint, as the loop does."""
    trainer = loaded(options(plain=True))
    trainer.step(Batch.of_windows(windows()))
    return partial(
        save_sharded_checkpoint,
        team=ALONE,
        shard_format=trainer.shard_format,
        save_shards=trainer.save_shards,
        write_rest=lambda folder: None,
    )


def test_shards_are_on_the_disk_before_their_folder_has_its_name(options, tmp_path, monkeypatch):
    save, renames = shards_of(options), Renames(monkeypatch)
    folder = save(tmp_path, record={"step": 1})
    assert list(folder.rglob("*.distcp"))
    assert_synced_before_the_name(renames, folder)


def test_a_full_disk_loses_no_shards(options, tmp_path):
    save = shards_of(options)
    kept = save(tmp_path, record={"step": 1})
    with (
        longest_file(10_000),
        pytest.raises(OutputError, match=r"^finetune: --out cannot be written to: File too large"),
    ):
        save(tmp_path, record={"step": 2})
    assert list((tmp_path / "checkpoints").iterdir()) == [kept]
    assert load_checkpoint(tmp_path).record["step"] == 1


def test_gguf_reads_as_transformers_reads_it(tmp_path):
    for tied in (True, False):
        compare_with_transformers(write_tiny_gguf(tmp_path / f"{tied}.gguf", tie_word_embeddings=tied))


@pytest.mark.slow
def test_default_model_reads_as_transformers_reads_it():
    compare_with_transformers(default_model())


def compare_with_transformers(file):
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    ours = read_model(file)
    parameters = dict(theirs.named_parameters())
    assert ours.tensors.keys() == parameters.keys()
    for name, parameter in parameters.items():
        np.testing.assert_array_equal(ours.tensors[name], parameter.detach().numpy(), err_msg=name)
    wanted = theirs.config.to_dict()
    # Theirs says in its own words which file it came from, and not every kind has a head_dim; the rest has to be there.
    own = {"architectures": wanted["architectures"], "head_dim": wanted.get("head_dim")}
    assert {key: wanted.get(key) for key in ours.config} == ours.config | own


def test_device_that_is_not_here_is_refused(options, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match=r"^finetune: --device must be cpu or auto here, got gpu"):
        run(options(device="gpu"))
    assert not (tmp_path / "run").exists()


def test_processes_without_a_gpu_of_their_own_are_refused(options, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UnsupportedError, match=r"--nproc-per-node must be <= 1, the GPUs .*, got a process 1\."):
        run(options(device="auto"))
    assert not (tmp_path / "run").exists()


def test_unknown_architecture_is_refused(options, tmp_path):
    folder = write_tiny_folder(tmp_path / "other")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"mamba"'))
    with pytest.raises(InputError, match=r"must be a Llama-style causal language model"):
        run(options(model=str(folder)))
    assert not (tmp_path / "run").exists()


def words(options):
    """The command line of a run."""
    names = ("model", "text", "tokens", "steps", "batch", "lr", "out", "device")
    return ["finetune", "--num-shards", "3", *(w for name in names for w in (f"--{name}", str(getattr(options, name))))]


def test_a_missing_package_is_one_line_that_names_what_is_enough():
    done = run_with("torch", "tiled_torch", "finetune")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert re.match(r"tiled_torch: the package \w+ is not installed\. Install it with pip install '", done.stderr)
    assert hinted(done.stderr) == "cli,torch"


@pytest.mark.deep
def test_the_extras_that_a_message_names_are_enough_for_the_command(options, capsys):
    given = words(options(steps=2))
    done = run_with("cli,torch", "tiled_torch", *given)
    assert (done.returncode, done.stderr) == (0, "")
    assert "step 2/2  loss " in done.stdout
    assert main("tiled_torch", COMMANDS, given) == 2
    assert capsys.readouterr().err.startswith("finetune: --out must be a new or empty folder")


def test_a_model_it_cannot_do_is_one_line_and_exit_code_2(options, tmp_path, capsys):
    folder = write_tiny_folder(tmp_path / "other")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"silu"', '"sillu"'))
    assert main("tiled_torch", COMMANDS, words(options(model=str(folder)))) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert shown.startswith(
        "finetune: --model must have a configuration that transformers makes a model of, got one with "
    )
    assert "sillu" in shown
    assert not (tmp_path / "run").exists()


GLOO = "[/pytorch/third_party/gloo/gloo/"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(f"{GLOO}transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2"), True),
        (RuntimeError(f"{GLOO}transport/tcp/unbound_buffer.cc:129] Timed out waiting 20000ms for send"), True),
        (RuntimeError("Gloo connectFullMesh failed with ..."), True),
        (dist.DistNetworkError("the store is gone"), True),
        (RuntimeError(f"{GLOO}allgather.cc:30] the caller's own mistake"), False),
        (RuntimeError("shape '[3]' is invalid for input of size 2"), False),
        (KeyError("connection reset"), False),
    ],
    ids=str,
)
def test_who_is_lost_and_who_fails_alone(error, lost, monkeypatch, capsys):
    """A process that fails alone shows its traceback before anything that could wait for the others."""
    done = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("destroyed"))
    monkeypatch.setattr(os, "_exit", done.append)
    team = object.__new__(TorchTeam)
    reason = team.lost(error)
    assert (reason is not None) == lost
    try:
        if reason is None:  # otherwise the loop says it, and goes on to leave
            raise error
    except Exception:
        team.leave()
    else:
        team.leave()
    assert done[0] == 1
    assert (f"{type(error).__name__}: " in capsys.readouterr().err) != lost
