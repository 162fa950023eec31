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
from tests.loading import assert_no_whole_model, write_big
from tests.ranks import LOOPBACK, Ranks
from tests.tiny_model import QWEN2, write_inputs, write_tiny_folder
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


def start(ranks, *arguments, module="tiled_torch"):
    """torchrun, its output in one pipe."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", **LOOPBACK}
    command = [*launcher, "-m", module, "finetune", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)


def run(ranks, *arguments, **module):
    """The exit code and all that was shown."""
    process = start(ranks, *arguments, **module)
    shown, _ = process.communicate(timeout=300)
    return process.returncode, shown


def losses(out):
    return [record["loss"] for record in step_records(read_log(out))]


def assert_same_model(out, inputs):
    ours, theirs = (read_model(folder / MODEL_NAME).tensors for folder in (out, inputs / "alone"))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert np.linalg.norm(ours[name] - weight) <= MODEL_FLOAT32 * np.linalg.norm(weight), name


def test_two_ranks_have_the_losses_of_one_and_one_goes_on(inputs, tmp_path):
    """Sharded over two ranks for two steps, then one process reads their checkpoint."""
    out = tmp_path / "run"
    code, shown = run(2, *words(inputs, out, "--fsdp", "2", "--steps", "2"))
    assert code == 0, shown
    assert "dp 1 x fsdp 2 x cp 1 x tp 1, 2 processes" in shown
    assert shown.count("step 2/2  loss ") == 1  # one process speaks
    checkpoint = load_checkpoint(out)
    assert checkpoint.state is None
    assert len(list(checkpoint.shards.glob("*.distcp"))) == 2
    assert run_alone(inputs, out, resume=True) == 0
    assert losses(out) == pytest.approx(losses(inputs / "alone"), rel=DEMO_LOSS_RTOL)
    assert_same_model(out, inputs)
    assert AutoModelForCausalLM.from_pretrained(out / MODEL_NAME).config.hidden_size == 32


def test_two_ranks_go_on_from_one_and_from_another_layout(inputs, two, tmp_path):
    """One process, then two that split every layer: the whole weights are cut, the moments too."""
    out = tmp_path / "run"
    assert run_alone(inputs, out, steps=1) == 0
    run_on(two, options(inputs, out, tp=2, resume=True, checkpointing=True))
    assert losses(out) == pytest.approx(losses(inputs / "alone"), rel=DEMO_LOSS_RTOL)
    assert_same_model(out, inputs)


def test_context_parallel_ranks_go_on_in_another_layout(inputs, two, tmp_path):
    """Two ranks with half of every sequence each, then two that split the layers, then one process; layers as one function."""
    out, plain, block = tmp_path / "run", tmp_path / "plain", tmp_path / "block"
    shown = run_on(
        two,
        options(inputs, out, cp=2, steps=2, checkpointing=True),
        options(inputs, out, tp=2, steps=3, resume=True),
        options(inputs, plain, cp=2, plain=True, num_shards=None),
        options(inputs, block, cp=2, scope="block", offload=True),
    )
    assert "dp 1 x fsdp 1 x cp 2 x tp 1, 2 processes" in shown[0]
    assert run_alone(inputs, out, resume=True) == 0
    expected = pytest.approx(losses(inputs / "alone"), rel=DEMO_LOSS_RTOL)
    for found in (out, plain, block):
        assert losses(found) == expected
        assert_same_model(found, inputs)
    record = step_records(read_log(plain))[-1]
    tokens = record["tokens_per_second"] * record["seconds"]
    assert tokens == pytest.approx(4 * 48, rel=FLOOR["float64"]), "the tokens of all ranks"


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


@pytest.mark.parametrize(("axis", "gguf"), [("fsdp", False), ("tp", True)])
def test_no_rank_holds_the_whole_model_while_it_loads(inputs, two, tmp_path, axis, gguf):
    big = str(write_big(tmp_path, gguf))
    first = options(inputs, tmp_path / "run", **{axis: 2})  # what is imported and made once is no part of the weights
    for _, measured in two.run("tests.app.ranks_torch_finetune:loading", options=[first, first | {"model": big}]):
        assert_no_whole_model(**measured)


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


def test_two_axes_of_four_ranks_and_replicas(inputs, two, tmp_path):
    """Four ranks with a part of every layer's part each; then two with whole copies go on from their checkpoint."""
    out = tmp_path / "run"
    with Ranks(4) as four:
        assert (
            "dp 1 x fsdp 2 x cp 1 x tp 2, 4 processes" in run_on(four, options(inputs, out, fsdp=2, tp=2, steps=2))[0]
        )
    run_on(two, options(inputs, out, dp=2, resume=True))
    assert losses(out) == pytest.approx(losses(inputs / "alone"), rel=DEMO_LOSS_RTOL)
    assert_same_model(out, inputs)


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
    code, shown = run(2, *words(inputs, tmp_path / "run", *more))
    assert code != 0
    assert shown.count(line) == 1, shown
    assert re.search(r"Root Cause.*?exitcode\s*: 2 ", shown, re.DOTALL), shown
    assert "/tiled_torch/" not in shown  # no traceback of ours
    assert not (tmp_path / "run").exists()


def workers(process):
    """The ranks below torchrun, by rank."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            rank = child.environ().get("RANK")
        except psutil.Error:
            continue
        if rank is not None and "finetune" in child.cmdline():
            found[int(rank)] = child
    return found


@pytest.mark.parametrize(
    ("ranks", "lost", "how"),
    [
        (2, 1, signal.SIGKILL),
        (2, 0, signal.SIGKILL),
        pytest.param(4, 2, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(2, 1, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_ends_the_run_and_keeps_the_last_checkpoint(inputs, tmp_path, ranks, lost, how):
    """A rank that is killed, the first one too, and one that only stops: the others say so and end, within the timeout plus
    30 s."""
    out, timeout = tmp_path / "run", 10 if how == signal.SIGSTOP else GROUP_TIMEOUT
    more = ("--fsdp", str(ranks), "--steps", "5000", "--group-timeout", str(timeout), "--save-every", "3")
    process = start(ranks, *words(inputs, out, *more))
    try:
        deadline = time.monotonic() + 200
        while not (out / LOG_NAME).exists() or len(losses(out)) < 4:
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        found = workers(process)
        victim = found.pop(lost)
        victim.send_signal(how)
        for survivor in found.values():
            survivor.wait(timeout + 30)
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()  # torchrun gives one that only stopped half a minute of its own
        shown, _ = process.communicate(timeout=30)
    finally:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            child.kill()
        process.kill()
    assert process.returncode != 0
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
    code, shown = run(2, *words(inputs, tmp_path / "run", "--fsdp", "2"), module="tests.app.torch_failing_finetune")
    assert code != 0
    assert "KeyError: 'the fault of process 1 alone'" in shown
    assert "Timed out" not in shown
