"""The documents' tables and picture are what the records say; their links, make targets and pages of the reference exist."""

import ast
import dataclasses
import json
import re
from pathlib import Path

import pytest

from shared_specs.app.bench.records import FORMAT, read_records
from shared_specs.app.bench.tables import BLOCK, RECORDS, TABLES, documents, render
from shared_specs.app.command import SHARED
from shared_specs.app.options import flag

ROOT = Path(__file__).parents[2]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in documents()}
TEXT = TEXTS["README.md"]
MKDOCS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
# Pages that the navigation names and that are made elsewhere.
COMING: set[str] = set()


@pytest.mark.parametrize("name", TEXTS)
def test_tables_come_from_records(name: str) -> None:
    assert "No record yet" not in TEXTS[name]
    assert render(TEXTS[name], read_records(RECORDS)) == TEXTS[name], "run: python -m shared_specs.app.bench.tables"


def test_every_table_is_shown() -> None:
    assert {name for text in TEXTS.values() for _, name, _ in BLOCK.findall(text)} == TABLES.keys()


def test_a_table_that_differs_is_noticed() -> None:
    results = [{"variant": "tiled", "workload": "w", "ratio_to_plain": 1.25}]
    record = {"kind": "mlp", "half": "tiled_torch", "date": "2026-01-01T00:00:00Z", "results": results, "versions": {}}
    record |= {"hardware": {"cpu": "c", "cores": 1, "memory_bytes": 2**30}}
    empty = "<!-- table: mlp-torch -->\n<!-- end -->"
    written = render(empty, [record])
    assert "| tiled | 1.25 |" in written
    assert render(written, [record]) == written
    tampered = written.replace("1.25", "1.05")
    assert render(tampered, [record]) != tampered


def test_the_first_pages_bytes_and_milliseconds_are_those_of_its_table() -> None:
    said = re.findall(r"(\d+\.\d+) GiB and\s+(\d+\.\d+) ms", TEXT)
    table = next(found[0] for found in BLOCK.finditer(TEXTS["docs/index.md"]) if found[2] == "gpu-mlp-short")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    of = {row[0]: (row[4], row[1]) for row in rows}
    assert said == [of["plain"], of["tiled"], of["tiled-keep-1"]]


def test_the_picture_comes_from_the_newest_record() -> None:
    image = pytest.importorskip("PIL.Image")
    picture = pytest.importorskip("shared_specs.app.demo.document_picture", exc_type=ImportError)
    with image.open(picture.PICTURE) as shown:
        drawn = json.loads(shown.text[picture.DATA])
    assert drawn == picture.data_of(read_records(RECORDS)), "run: python -m shared_specs.app.demo.document_picture"
    assert {point["variant"] for point in drawn["points"]} == {"plain", "checkpointed", "tiled", "block-tiled"}


def test_records_are_complete() -> None:
    for record in read_records(RECORDS):
        assert record["format"] == FORMAT
        assert {"kind", "half", "date", "command", "commit", "hardware", "versions", "results"} <= set(record)
        assert record["results"]


@pytest.mark.parametrize("name", [*TEXTS, "CONTRIBUTING.md", "shared_specs/README.md"])
def test_local_links_exist(name: str) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", (ROOT / name).read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / name).parent.joinpath(link).exists()] == []


@pytest.mark.parametrize("name", TEXTS)
def test_files_and_targets_that_are_named_exist(name: str) -> None:
    """`folder/file` of this repository, and `make target`."""
    files = re.findall(
        r"`((?:benchmarks|docs|examples|shared_specs|tests|tiled_jax|tiled_torch)/[\w/.-]+)`", TEXTS[name]
    )
    assert [file for file in files if not (ROOT / file).exists()] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"`make ([a-z0-9-]+)", TEXTS[name])) | set(
        re.findall(r"^make (\S+) +#", TEXTS[name], re.M)
    )
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.M)] == []


def commands(text: str) -> list[list[str]]:
    """The words of every line of a shell block that starts a command or a script of this repository, continued lines joined."""
    blocks = [block for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M) if not language]
    lines = [line.partition(" #")[0] for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line.split() for line in lines if re.search(r"-m (tiled_|shared_specs\.app\.plan)|examples/", line)]


def flags_of(words: list[str]) -> set[str]:
    """The flags that the command or script of these words knows, from their declarations."""
    script = next((word for word in words if word.startswith("examples/")), None)
    if script is not None:
        return set(re.findall(r'add_argument\("(--[\w-]+)"', (ROOT / script).read_text(encoding="utf-8")))
    package = next(place for place, word in enumerate(words) if word == "-m") + 1
    name = "plan" if words[package].endswith(".plan") else words[package + 1]
    return {flag(field.name) for field in dataclasses.fields(SHARED[name][1])}


@pytest.mark.parametrize("name", TEXTS)
def test_options_that_are_shown_exist(name: str) -> None:
    for words in commands(TEXTS[name]):
        first = next(n for n, word in enumerate(words) if word == "-m" or word.startswith("examples/"))
        shown = {word.partition("=")[0] for word in words[first:] if word.startswith("--")}
        assert shown <= flags_of(words), " ".join(words)


def test_an_option_that_does_not_exist_is_noticed() -> None:
    page = "```\ntorchrun --nproc-per-node 2 -m tiled_jax finetune \\\n  --fsdp 2 --fdsp 2\n```\n"
    (words,) = commands(page)
    assert {"--fsdp", "--fdsp"} - flags_of(words) == {"--fdsp"}
    assert "--tokens" in flags_of(["python", "examples/long_context_jax.py"])


def test_every_page_is_in_the_navigation() -> None:
    navigation = set(re.findall(r": ([\w/]+\.md)$", MKDOCS, re.M))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= navigation
    assert navigation - pages <= COMING


@pytest.mark.parametrize("package", ["tiled_torch", "tiled_torch.parallel", "tiled_jax", "tiled_jax.parallel"])
def test_every_public_name_is_in_the_reference(package: str) -> None:
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
    (public,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    shown = set(re.findall(r"^::: ([\w.]+)$", "\n".join(TEXTS.values()), re.M))
    last = {name.rpartition(".")[2] for name in shown if name.startswith(("shared_specs.", package.partition(".")[0]))}
    assert set(public) - last <= {"linen"}, "write ::: lines for them in docs/reference"
