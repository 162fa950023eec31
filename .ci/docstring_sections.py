"""A griffe extension: the sections of this project's docstrings as the parser of `make docs` wants them.

It needs an empty line before each, "Examples" for "Example", and knows nothing of Numerics, Memory and Source, which become
paragraphs. Prose is no Markdown here: "s[i][j]" is no link, and "> 0" no quotation.
"""

import re
from typing import Any

import griffe

PARSED = ("Args", "Attributes", "Returns", "Raises", "Yields")
PROSE = ("Numerics", "Memory", "Source")


class Sections(griffe.Extension):
    """Rewrite the docstring of every object that is found."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = rewritten(obj.docstring.value)


def rewritten(text: str) -> str:
    """Return the docstring with its sections apart."""
    lines: list[str] = []
    prose = example = False
    for line in text.splitlines():
        title = re.match(r"(\w+):(?=$| )", line)
        name = title[1] if title else ""
        example = name == "Example" or (example and not name)
        if not example:
            line = re.sub(r"^(\s+[\w, ]+: )>", r"\1\\>", line.replace("][", "]\\["))
        if name in PROSE:
            lines += ["", f"**{name}.** {line[len(name) + 1 :].strip()}"]
        elif name == "Example":
            lines += ["", "Examples:", *([f"    {line[8:].strip()}"] if line[8:].strip() else [])]
        elif name in PARSED:
            lines += ["", line]
        else:
            lines.append(line.strip() if prose else line)
        # A section ends where the next begins, or at the margin.
        prose = name in PROSE or (prose and line.startswith(" ") and not name)
    return "\n".join(lines)
