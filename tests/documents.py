"""The Python of documents, notebooks and scripts, run as a reader would run it: top to bottom, in one namespace."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>.+?) -->\n+)?^```python\n(?P<code>.*?)^```$", re.S | re.M)


def pages() -> list[Path]:
    """README and every page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str) -> list[tuple[int, str]]:
    """Line and code of each Python block of a page, without those that say why they are not run."""
    return [
        (text.count("\n", 0, found.start("code")), found["code"])
        for found in BLOCK.finditer(text)
        if found["reason"] is None
    ]


def unrun(path: Path, words: str) -> str:
    """Return the one block of a page that has these words and is not run with it, for a test that has what it wants."""
    (found,) = (
        block["code"]
        for block in BLOCK.finditer(path.read_text(encoding="utf-8"))
        if block["reason"] is not None and words in block["code"]
    )
    return found


def cells(text: str) -> list[tuple[int, str]]:
    """Number and code of each cell of a notebook."""
    found = json.loads(text)["cells"]
    return [(number, "".join(cell["source"])) for number, cell in enumerate(found) if cell["cell_type"] == "code"]


def run(path: Path, parts: list[tuple[int, str]]) -> dict[str, Any]:
    """Run the parts, each at its place in the file for tracebacks; return the names that they leave."""
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    for line, code in parts:
        exec(compile("\n" * line + code, str(path), "exec"), names)
    return names


def script(stem: str) -> Any:
    """The module of a script of examples/, which no package holds."""
    spec = importlib.util.spec_from_file_location(f"example_{stem}", EXAMPLES / f"{stem}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
