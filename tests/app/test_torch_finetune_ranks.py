"""`finetune` under torchrun: the losses of one process, checkpoints that other numbers of ranks go on from, a killed rank."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM

from shared_specs.app.finetune.checkpoint import load_checkpoint
from shared_specs.app.finetune.log import LOG_NAME, read_log, step_records
from shared_specs.app.finetune.loop import MODEL_NAME, finetune
from shared_specs.app.models.weights import read_model
from shared_specs.app.options import FinetuneOptions, flag
from shared_specs.tolerances import DEMO_LOSS_RTOL, FLOOR, MODEL_FLOAT32, limit
from tests.launched import rank_pids, torchrun
from tests.loading import assert_no_whole_model, write_big
from tests.ranks import LOOPBACK, Ranks
from tests.tiny_model import MIXTRAL, QWEN2, write_chat, write_inputs, write_text, write_tiny_folder
from tiled_torch.commands.finetune.trainer import TorchTrainer

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
RUNS = "tests.app.ranks_torch_finetune:runs"
STEPS, GROUP_TIMEOUT = 4, 60


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model, a text and a run of one process, which no test writes to."""
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    assert run_alone(folder, folder / "alone") == 0
    return folder


def options(inputs, out, **changes):
    """Of a run, by field."""
    base = {"tokens": 48, "steps": STEPS, "batch": 4, "lr": 1e-3, "num_shards": 3, "save_every": 2, "device": "cpu"}
    files = {"model": str(inputs / "model"), "text": str(inputs / "text"), "out": str(out)}
    return base | files | {"group_timeout": GROUP_TIMEOUT} | changes


def words(inputs, out, *more):
    """Of a run, on the command line."""
    given = options(inputs, out).items()
    return [*(word for name, value in given for word in (flag(name), str(value))), *more]


def run_alone(inputs, out, **changes):
    return finetune(TorchTrainer(), FinetuneOptions(**options(inputs, out, **changes)), Console(file=io.StringIO()))


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


def run_on(ranks, *wanted):
    """Runs on ranks that are there already, one after another, each without an error; what each of them showed."""
    first, *others = ranks.run(RUNS, options=list(wanted))
    for answers in (first, *others):
        assert [answer.get("code") for answer in answers] == [0] * len(wanted), answers
    return [answer["shown"] for answer in first]


def run(folder, *arguments):
    """The exit code of two ranks and all that was shown."""
    log = folder / "shown"
    process = torchrun(2, "tiled_torch", "finetune", *arguments, log=log)
    return code_of(process, 200), log.read_text()


def losses(out):
    return [record["loss"] for record in step_records(read_log(out))]


def assert_same_model(out, inputs):
    ours, theirs = (read_model(folder / MODEL_NAME).tensors for folder in (out, inputs / "alone"))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert np.linalg.norm(ours[name] - weight) <= MODEL_FLOAT32 * np.linalg.norm(weight), name


def test_two_ranks_have_the_losses_of_one_and_one_goes_on(inputs, two, tmp_path):
    """Sharded over two ranks for two steps, then one process reads their checkpoint."""
    out = tmp_path / "run"
    run_on(two, options(inputs, out, fsdp=2, steps=2))
    checkpoint = load_checkpoint(out)
    assert checkpoint.state is None
    assert len(list(checkpoint.shards.glob("*.distcp"))) == 2
    assert run_alone(inputs, out, resume=True) == 0
    assert losses(out) == pytest.approx(losses(inputs / "alone"), rel=DEMO_LOSS_RTOL)
    assert_same_model(out, inputs)
    assert AutoModelForCausalLM.from_pretrained(out / MODEL_NAME).config.hidden_size == 32


@pytest.mark.deep
def test_two_ranks_go_on_from_one_and_from_another_layout(inputs, two, tmp_path):
    """One process, then two that split every layer: the whole weights are cut, the moments too."""
    out = tmp_path / "run"
    assert run_alone(inputs, out, steps=1) == 0
    run_on(two, options(inputs, out, tp=2, resume=True, checkpointing=True))
    assert losses(out) == pytest.approx(losses(inputs / "alone"), rel=DEMO_LOSS_RTOL)
    assert_same_model(out, inputs)


@pytest.mark.deep
def test_context_parallel_ranks_go_on_in_another_layout(inputs, two, tmp_path):
    """Two ranks with half of every sequence each, then two that split the layers, then one process; layers as one function."""
    out, plain, block, ring, split = (tmp_path / name for name in ("run", "plain", "block", "ring", "split"))
    shown = run_on(
        two,
        options(inputs, out, cp=2, steps=2, checkpointing=True),
        options(inputs, out, tp=2, steps=3, resume=True),
        options(inputs, plain, cp=2, plain=True, num_shards=None),
        options(inputs, block, cp=2, scope="block", offload=True),
        options(inputs, ring, cp=2, context="ring"),
        options(inputs, split, tp=2, scope="block", offload=True),
    )
    assert "dp 1 x fsdp 1 x cp 2 x tp 1, 2 processes" in shown[0]
    assert run_alone(inputs, out, resume=True) == 0
    expected = pytest.approx(losses(inputs / "alone"), rel=DEMO_LOSS_RTOL)
    for found in (out, plain, block, ring, split):
        assert losses(found) == expected
        assert_same_model(found, inputs)
    record = step_records(read_log(plain))[-1]
    tokens = record["tokens_per_second"] * record["seconds"]
    assert tokens == pytest.approx(4 * 48, rel=FLOOR["float64"]), "the tokens of all ranks"


@pytest.mark.deep
def test_schedule_decay_clipping_and_evaluation(inputs, two, tmp_path):
    """The norm of gradients that are whole, in parts or split by layer, and a last batch of which one rank has nothing."""
    training = {"schedule": "cosine", "warmup": 1, "weight_decay": 0.5, "clip": 0.5, "eval_fraction": 0.21}
    assert run_alone(inputs, tmp_path / "alone", **training) == 0
    layouts = [{"dp": 2}, {"tp": 2}, {"cp": 2}, {"fsdp": 2, "grad_accumulation": 2, "batch": 2}]
    outs = [tmp_path / str(number) for number in range(len(layouts))]
    run_on(two, *(options(inputs, out, **training | axes) for out, axes in zip(outs, layouts, strict=True)))

    def curves(out, event, name):
        return [record[name] for record in step_records(read_log(out), event)]

    assert min(curves(tmp_path / "alone", "step", "gradient_norm")) > training["clip"]
    for out, axes in zip(outs, layouts, strict=True):
        assert_same_model(out, tmp_path)
        for curve in (("step", "loss"), ("step", "gradient_norm"), ("eval", "loss"), ("eval", "step")):
            found, alone = (curves(folder, *curve) for folder in (out, tmp_path / "alone"))
            assert found == pytest.approx(alone, rel=DEMO_LOSS_RTOL), (axes, curve)


def test_a_plan_sets_what_it_says(two, tmp_path):
    """One sequence and one head for two ranks: a ring, of a model whose layers are checkpointed and tiled."""
    write_tiny_folder(tmp_path / "model", num_attention_heads=1, num_key_value_heads=1)
    write_text(tmp_path / "text")
    of_both = {"batch": 1, "steps": 2, "num_shards": None}
    (shown,) = run_on(two, options(tmp_path, tmp_path / "planned", cp=2, plan="4GB", **of_both))
    assert "plan: --fsdp 1 --cp 2 --scope mlp --context ring --checkpointing\n" in shown
    assert "dp 1 x fsdp 1 x cp 2 x tp 1, 2 processes" in shown
    header = read_log(tmp_path / "planned")[0]["options"]
    assert {name: header[name] for name in ("cp", "context", "scope", "plain", "checkpointing", "plan")} == {
        "cp": 2, "context": "ring", "scope": "mlp", "plain": False, "checkpointing": True, "plan": None,
    }  # fmt: skip
    assert run_alone(tmp_path, tmp_path / "alone", **of_both) == 0
    assert losses(tmp_path / "planned") == pytest.approx(losses(tmp_path / "alone"), rel=DEMO_LOSS_RTOL)


@pytest.mark.deep
def test_packed_conversations_in_micro_batches(inputs, two, tmp_path):
    """Of what the assistant says each rank has as much as there is: the mean is over all of it, as in one process."""
    folder = write_chat(tmp_path / "inputs")
    model, chat = str(folder / "model"), str(folder / "chat")
    shared = {"model": model, "text": None, "chat": chat, "pack": True, "tokens": 64, "batch": 2, "steps": 3}
    assert run_alone(inputs, tmp_path / "alone", **shared | {"batch": 4}) == 0
    layouts = [{"dp": 2}, {"fsdp": 2, "plain": True, "num_shards": None}, {"cp": 2, "context": "ring"}, {"tp": 2}]
    outs = [tmp_path / str(number) for number in range(len(layouts))]
    run_on(
        two,
        *(options(inputs, out, **shared, grad_accumulation=2, **axes) for out, axes in zip(outs, layouts, strict=True)),
    )
    for out in outs:
        assert losses(out) == pytest.approx(losses(tmp_path / "alone"), rel=DEMO_LOSS_RTOL), out
        assert_same_model(out, tmp_path)


@pytest.mark.deep
def test_experts_cut_over_two_ranks(inputs, two, tmp_path):
    """Three experts, so that their rows are cut; then half of every sequence each, layers as one function; then one process."""
    model = str(write_tiny_folder(tmp_path / "mixtral", **MIXTRAL))
    assert run_alone(inputs, tmp_path / "alone", model=model) == 0
    out, shared = tmp_path / "run", {"model": model}
    run_on(two, options(inputs, out, fsdp=2, steps=1, **shared))
    run_on(two, options(inputs, out, cp=2, scope="block", steps=2, resume=True, **shared))
    assert run_alone(inputs, out, resume=True, **shared) == 0
    assert losses(out) == pytest.approx(losses(tmp_path / "alone"), rel=DEMO_LOSS_RTOL)
    assert_same_model(out, tmp_path)


@pytest.mark.deep
def test_split_layers_with_biases_of_queries_keys_and_values(inputs, two, tmp_path):
    """Of a Qwen2 model, whose plan is the registry's; then its weights and moments sharded."""
    model = str(write_tiny_folder(tmp_path / "model", **QWEN2))
    assert run_alone(inputs, tmp_path / "alone", model=model, steps=2) == 0
    out, shared = tmp_path / "run", {"model": model, "checkpointing": True}
    run_on(
        two,
        options(inputs, out, **shared, tp=2, steps=1),
        options(inputs, out, **shared, fsdp=2, steps=2, resume=True),
    )
    assert losses(out) == pytest.approx(losses(tmp_path / "alone"), rel=DEMO_LOSS_RTOL)
    assert_same_model(out, tmp_path)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(("axis", "gguf"), [("fsdp", False), ("tp", True)])
def test_no_rank_holds_the_whole_model_while_it_loads(inputs, two, tmp_path, axis, gguf):
    big = str(write_big(tmp_path, gguf))
    first = options(inputs, tmp_path / "run", **{axis: 2})  # what is imported and made once is no part of the weights
    for _, measured in two.run("tests.app.ranks_torch_finetune:loading", options=[first, first | {"model": big}]):
        assert_no_whole_model(**measured)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("axis", ["fsdp", "cp"])
def test_bfloat16(inputs, two, tmp_path, axis):
    """The forward under autocast, of sharded float32 weights: as near to float32 as one process in bfloat16 is."""
    assert run_alone(inputs, tmp_path / "one", dtype="bfloat16") == 0
    run_on(two, options(inputs, tmp_path / "two", dtype="bfloat16", **{axis: 2}))
    exact, one, two = (np.asarray(losses(out)) for out in (inputs / "alone", tmp_path / "one", tmp_path / "two"))
    assert np.all(abs(two - exact) <= limit(float(abs(one - exact).max() / exact.min()), "bfloat16") * exact)
    weights = read_model(tmp_path / "two" / MODEL_NAME).tensors.values()
    assert {weight.dtype for weight in weights} == {np.dtype("float32")}


def test_sequences_and_heads_that_cannot_be_cut_are_refused(inputs, two, tmp_path):
    """Each before anything is written; the second by the model's plan."""
    folder = write_tiny_folder(tmp_path / "model", num_attention_heads=3, num_key_value_heads=3, hidden_size=24)
    found = two.run(
        RUNS,
        options=[
            options(inputs, tmp_path / "run", cp=2, tokens=47),
            options(inputs, tmp_path / "run", cp=2, model=str(folder)),
        ],
    )
    tokens = (
        "finetune: --tokens must be a multiple of 2, got 47. Every one of the 2 ranks of --cp takes as many tokens of"
    )
    heads = "parallelize: num_attention_heads must be a multiple of the 2 ranks of the mesh axes cp, got 3."
    for answers in found:
        for answer, kind, text in zip(answers, ("InputError", "SpecError"), (tokens, heads), strict=True):
            assert answer["error"][0] == kind
            assert answer["error"][1].startswith(text), answer
    assert not (tmp_path / "run").exists()


@pytest.mark.deep
def test_two_axes_of_four_ranks_and_replicas(inputs, two, tmp_path):
    """Four ranks with a part of every layer's part each; then two with whole copies go on from their checkpoint.

    And four that share a sequence of a model with two heads: a ring of pairs that exchange tokens for them.
    """
    out, heads = tmp_path / "run", {"num_attention_heads": 2, "num_key_value_heads": 1}
    two_heads = {"model": str(write_tiny_folder(tmp_path / "model", **heads)), "clip": 0.5}
    assert run_alone(inputs, tmp_path / "alone", **two_heads) == 0
    with Ranks(4) as four:
        (shown,) = run_on(four, options(inputs, tmp_path / "2d", **two_heads, cp=4, context="2d", checkpointing=True))
        assert "dp 1 x fsdp 1 x cp 4 x tp 1, rings of 2 x 2 ranks, 4 processes" in shown
        four.end()  # DTensor would take another mesh of as many ranks for this one, whose groups are gone
        assert (
            "dp 1 x fsdp 2 x cp 1 x tp 2, 4 processes" in run_on(four, options(inputs, out, fsdp=2, tp=2, steps=2))[0]
        )
    run_on(two, options(inputs, out, dp=2, resume=True))
    assert losses(out) == pytest.approx(losses(inputs / "alone"), rel=DEMO_LOSS_RTOL)
    assert_same_model(out, inputs)
    assert losses(tmp_path / "2d") == pytest.approx(losses(tmp_path / "alone"), rel=DEMO_LOSS_RTOL)
    assert_same_model(tmp_path / "2d", tmp_path)


@pytest.mark.slow
def test_four_ranks(inputs, two, tmp_path):
    out, layouts = tmp_path / "run", ({"dp": 2, "tp": 2}, {"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}, {"fsdp": 2, "cp": 2})
    wanted = [
        options(inputs, out, fsdp=4, steps=2),
        *(options(inputs, tmp_path / f"{number}", **axes) for number, axes in enumerate(layouts)),
        options(inputs, tmp_path / "cp 4", cp=4, checkpointing=True),
    ]
    with Ranks(4) as four:
        for each in wanted:
            run_on(four, each)
            four.end()  # DTensor would take another mesh of as many ranks for this one, whose groups are gone
    run_on(two, options(inputs, out, dp=2, resume=True))
    for found in (out, tmp_path / "cp 4", *(tmp_path / f"{n}" for n in range(len(layouts)))):
        assert losses(found) == pytest.approx(losses(inputs / "alone"), rel=DEMO_LOSS_RTOL), found
    assert_same_model(out, inputs)


# What a user gets wrong, and the line that says so. The first is found by the model's plan, the second before ranks meet.
WRONG = {
    "heads": (("--tp", "2"), "parallelize: num_key_value_heads must be a multiple of the 2 ranks of the mesh axis 'tp', got 3"),
    "ranks": (("--fsdp", "4"), "--dp x --fsdp x --cp x --tp must be 2, the processes of this run, got 1 x 4 x 1 x 1 = 4."),
    "batch": (("--fsdp", "2", "--batch", "3"), "finetune: --batch must be a multiple of 2, got 3."),
    "no ranks": (("--fsdp", "0"), "finetune: --fsdp must be >= 1, got 0."),
    "text": (("--fsdp", "2", "--text", "nowhere"), "finetune: --text must be a text file, got nowhere, which does not exist."),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "ranks" else pytest.mark.slow) for n in WRONG])
def test_what_is_wrong_is_said_once(inputs, tmp_path, name):
    """In one line, with the exit code of bad input (torchrun's own is always 1), and nothing is written."""
    more, line = WRONG[name]
    if name == "heads":
        changes = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
        more += ("--model", str(write_tiny_folder(tmp_path / "model", **changes)))
    code, shown = run(tmp_path, *words(inputs, tmp_path / "run", *more))
    assert code != 0
    assert shown.count(line) == 1, shown
    assert re.search(r"Root Cause.*?exitcode\s*: 2 ", shown, re.DOTALL), shown
    assert "/tiled_torch/" not in shown  # no traceback of ours
    assert not (tmp_path / "run").exists()


def from_nothing(ranks, *arguments, log, module="tiled_torch"):
    """torchrun itself, as a user has it."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, "-m", module, "finetune", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", **LOOPBACK}
    with log.open("w") as shown:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=shown, stderr=subprocess.STDOUT)


def ranks_of(pid):
    """The processes of the ranks below torchrun, by rank."""
    found = {}
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if (rank := child.environ().get("RANK")) is not None and "finetune" in child.cmdline():
                found[int(rank)] = child
    return found


def code_of(process, seconds=0.0):
    """The exit code, once there is one."""
    if isinstance(process, subprocess.Popen):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(seconds)
        return None
    process.join(seconds)
    return process.exitcode


@pytest.mark.deep
@pytest.mark.parametrize(
    ("ranks", "lost", "how", "launched"),
    [
        (2, 0, signal.SIGKILL, True),
        (2, 1, signal.SIGKILL, False),
        pytest.param(4, 2, signal.SIGKILL, True, marks=pytest.mark.slow),
        pytest.param(2, 1, signal.SIGSTOP, True, marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_ends_the_run_and_keeps_the_last_checkpoint(inputs, tmp_path, ranks, lost, how, launched):
    """A rank that is killed, the first one too, and one that only stops: the others say so and end, within the timeout plus
    30 s. One run is begun by torchrun itself, and its output is that of one process."""
    out, log, timeout = tmp_path / "run", tmp_path / "shown", 10 if how == signal.SIGSTOP else GROUP_TIMEOUT
    more = ("--fsdp", str(ranks), "--steps", "5000", "--group-timeout", str(timeout), "--save-every", "3")
    given = words(inputs, out, *more)
    if launched:
        process = torchrun(ranks, "tiled_torch", "finetune", *given, log=log)
    else:
        process = from_nothing(ranks, *given, log=log)
    try:
        deadline = time.monotonic() + 600
        while not (out / LOG_NAME).exists() or len(losses(out)) < 4:
            assert code_of(process) is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        found = (
            {rank: psutil.Process(pid) for rank, pid in rank_pids(log).items()} if launched else ranks_of(process.pid)
        )
        assert sorted(found) == list(range(ranks))
        victim = found.pop(lost)
        victim.send_signal(how)
        for survivor in found.values():
            survivor.wait(timeout + 30)
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()  # torchrun gives one that only stopped half a minute of its own
        code = code_of(process, 30)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                child.kill()
        code_of(process, 30)  # waited for, whatever went wrong
    assert code not in (0, None)
    shown = log.read_text()
    assert shown.count(f"dp 1 x fsdp {ranks} x cp 1 x tp 1, {ranks} processes") == 1
    assert shown.count("step 3/5000  loss ") == 1  # one process speaks
    lines = rf"^.*finetune: process \d of {ranks} lost another one, and the run ends: .*$"
    message = re.search(lines, shown, re.MULTILINE)
    assert message, shown
    checkpoint = load_checkpoint(out)
    assert str(checkpoint.folder) in message[0]
    step = checkpoint.record["step"]
    assert 3 <= step <= len(losses(out))
    assert run_alone(inputs, out, resume=True, steps=step + 1) == 0
    assert losses(out)[:STEPS] == pytest.approx(losses(inputs / "alone"), rel=DEMO_LOSS_RTOL)


@pytest.mark.slow
def test_a_rank_that_fails_alone_says_why(inputs, tmp_path):
    """In its second step, with a collective under way that nobody else joins: not after the group's timeout."""
    log, given = tmp_path / "shown", words(inputs, tmp_path / "run", "--fsdp", "2")
    process = from_nothing(2, *given, log=log, module="tests.app.torch_failing_finetune")
    assert code_of(process, 200) not in (0, None)
    shown = log.read_text()
    assert "KeyError: 'the fault of process 1 alone'" in shown
    assert "Timed out" not in shown
