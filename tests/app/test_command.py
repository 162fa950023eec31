"""The command line: declared once, refused in one line with exit code 2."""

import dataclasses

import pytest

from shared_specs.app.command import Command, main
from shared_specs.app.options import FinetuneOptions, InputError, flag, parse_size
from shared_specs.config import Tiling


def run(*arguments):
    """The exit code and the options that the command was given."""
    seen = []
    command = Command(
        name="finetune", help="Help.", options=FinetuneOptions, extras="cli", run=lambda o: seen.append(o) or 0
    )
    return main("package", [command], ["finetune", *arguments]), seen


def test_defaults_are_those_of_the_dataclass():
    assert run() == (0, [FinetuneOptions()])


def test_every_option_arrives():
    code, [options] = run(
        *("--model m --text t --tokens 7 --steps 8 --batch 9 --dtype bfloat16 --lr 0.5 --memory-budget 2MiB").split(),
        *("--keep 0.5 --checkpointing --rope-scale 2 --seed 3 --device cpu --out o --save-every 4 --resume").split(),
    )
    assert code == 0
    assert options == FinetuneOptions(
        model="m",
        text="t",
        tokens=7,
        steps=8,
        batch=9,
        dtype="bfloat16",
        lr=0.5,
        memory_budget=2 * 2**20,
        keep=0.5,
        checkpointing=True,
        rope_scale=2.0,
        seed=3,
        device="cpu",
        out="o",
        save_every=4,
        resume=True,
    )
    assert options.tiling() == Tiling(memory_budget=2 * 2**20, keep=0.5)
    assert run("--plain")[1][0].tiling() is None
    assert run("--num-shards", "4")[1][0].tiling() == Tiling(num_shards=4)
    assert run("--shard-tokens", "4")[1][0].tiling() == Tiling(shard_tokens=4)


def test_help_names_every_option(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run("--help")[0] == 0
    shown = capsys.readouterr().out
    for field in dataclasses.fields(FinetuneOptions):
        assert f"{flag(field.name)} " in shown
        assert field.metadata["help"].split()[0] in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--tokens 1", "finetune: --tokens must be >= 2, got 1"),
        ("--steps 0", "finetune: --steps must be >= 1, got 0"),
        ("--batch 0", "--batch must be >= 1"),
        ("--save-every -1", "--save-every must be >= 0"),
        ("--seed -1", "--seed must be >= 0"),
        ("--num-shards 0", "finetune: --num-shards must be >= 1, got 0"),
        ("--shard-tokens -3", "--shard-tokens must be >= 1"),
        ("--keep 1.5", "--keep must be between 0 and 1, got 1.5"),
        ("--keep nan", "--keep must be between 0 and 1, got nan"),
        ("--lr 0", "--lr must be > 0 and at most 1, got 0.0"),
        ("--lr inf", "--lr must be > 0 and at most 1, got inf"),
        ("--rope-scale 0.5", "--rope-scale must be between 1 and 1024, got 0.5"),
        ("--rope-scale 1e300", "--rope-scale must be between 1 and 1024, got 1e+300"),
        ("--lr 1e300", "--lr must be > 0 and at most 1, got 1e+300"),
        ("--num-shards 2 --shard-tokens 8", "--num-shards and --shard-tokens exclude each other"),
        ("--plain --num-shards 2", "--plain does not tile, so --num-shards would do nothing"),
        ("--plain --keep 0.5", "--plain does not tile, so --keep would do nothing"),
        ("--offload", "--offload needs --checkpointing or --scope block"),
        (
            "--scope block --keep 0.5",
            "--scope block excludes --keep. A layer that is one function keeps its input alone",
        ),
        (
            "--scope block --memory-budget 1GB",
            "--scope block excludes --memory-budget. It plans the shards of MLP and loss",
        ),
        ("--scope layer", "--scope must be one of mlp, block, got layer"),
        ("--memory-budget 3potatoes", "--memory-budget must be a size, got '3potatoes'"),
        ("--memory-budget 0.1", "--memory-budget must be >= 1"),
        ("--fsdp 2", "finetune: --batch must be a multiple of 2, got 1"),
        ("--dp 2 --fsdp 2 --batch 6", "--batch must be a multiple of 4, got 6"),
        ("--tp 0", "--tp must be >= 1"),
        ("--cp 0", "--cp must be >= 1"),
        ("--cp 3", "finetune: --tokens must be a multiple of 3, got 1024. Every one of the 3 ranks of --cp takes"),
        (
            "--cp 3 --context ring",
            "--tokens must be a multiple of 6, got 1024. Every one of the 3 ranks of a ring takes two",
        ),
        ("--context ring", "--context ring needs --cp of more than one rank, which share a sequence."),
        ("--context 2d", "--context 2d needs --cp of more than one rank, which share a sequence."),
        ("--context 3d", "--context must be one of ulysses, ring, 2d, got 3d"),
        ("--group-timeout 0", "--group-timeout must be >= 1"),
        ("--group-timeout 1000000000000", "--group-timeout must be <= 31536000, a year, got 1000000000000"),
        (f"--memory-budget {'9' * 400}GB", "--memory-budget must be a size that a machine can have. Write for"),
        ("--tokens many", "finetune: --tokens must be a whole number, got many."),
        ("--tokens 8 --tokens=1e3", "finetune: --tokens must be a whole number, got 1e3."),
        (f"--tokens {'9' * 5000}", f"finetune: --tokens must be a whole number, got {'9' * 300}..."),
        ("--num-shards x", "finetune: --num-shards must be a whole number, got x."),
        ("--rope-scale x", "finetune: --rope-scale must be a number, got x."),
        ("--dtype float8", "finetune: --dtype must be one of float32, bfloat16, got float8."),
        ("--tokens", "finetune: Option '--tokens' requires an argument."),
        ("--bogus", "finetune: No such option: --bogus"),
        ("stray", "finetune: Got unexpected extra argument(s) (stray)"),
    ],
)
def test_refused_in_one_line(arguments, words, capsys):
    code, seen = run(*arguments.split())
    shown = capsys.readouterr()
    assert (code, seen, shown.out) == (2, [], "")
    assert shown.err.count("\n") == 1
    assert words in shown.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--schedule cosinus", "finetune: --schedule must be one of constant, linear, cosine, got cosinus."),
        ("--warmup -1", "finetune: --warmup must be >= 0, got -1."),
        ("--warmup 11", "finetune: --warmup must be <= --steps 10, got 11."),
        ("--weight-decay nan", "finetune: --weight-decay must be between 0 and 1, got nan."),
        ("--clip 0", "finetune: --clip must be > 0, got 0.0."),
        ("--clip inf", "finetune: --clip must be > 0, got inf."),
        ("--eval-fraction 1", "finetune: --eval-fraction must be >= 0 and below 1, got 1.0."),
        ("--eval-fraction nan", "finetune: --eval-fraction must be >= 0 and below 1, got nan."),
        ("--eval-every 0 --eval-fraction 0.1", "finetune: --eval-every must be >= 1, got 0."),
        ("--eval-every 3", "finetune: --eval-every needs --eval-fraction, which holds something out."),
    ],
)
def test_what_an_optimizer_cannot_mean_is_refused(arguments, words, capsys):
    assert run(*arguments.split()) == (2, [])
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert words in shown.err


def test_exit_codes_are_told_by_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    command = Command(name="finetune", help="Help.", options=FinetuneOptions, extras="cli", run=lambda options: 0)
    assert main("package", [command], ["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Exit codes: 0, done; 1, done, and something is not" in " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= 60


def test_unknown_command_is_refused(capsys):
    command = Command(name="finetune", help="Help.", options=FinetuneOptions, extras="cli", run=lambda options: 0)
    assert main("package", [command], ["train"]) == 2
    assert capsys.readouterr().err == "package: No such command 'train'.\n"


def test_exit_code_of_the_command_is_passed_on():
    command = Command(name="finetune", help="Help.", options=FinetuneOptions, extras="cli", run=lambda options: 130)
    assert main("package", [command], ["finetune"]) == 130


def test_missing_package_is_named(capsys):
    def needs(name):
        def run(options):
            raise ModuleNotFoundError(name=name)

        return [Command(name="finetune", help="Help.", options=FinetuneOptions, extras="cli", run=run)]

    assert main("package", needs("flax.nnx"), ["finetune"]) == 2
    assert "the package flax is not installed" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError):  # a fault of our own is no advice to the user
        main("package", needs("tiled_jax.models"), ["finetune"])


def test_sizes():
    sizes = {
        "512MiB": 512 * 2**20,
        "2GB": 2 * 10**9,
        "1.5 KiB": 1536,
        "77": 77,
        "4gib": 2**32,
        "1 TiB": 2**40,
        "2TB": 2 * 10**12,
    }
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "MiB", "-1MiB", "1 MiB 2", "1TiBB"):
        with pytest.raises(InputError, match=r"must be a size"):
            parse_size(text)
