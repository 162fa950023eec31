"""The description of the project on a package index; everything else is in pyproject.toml.

It is README.md, where a link to a file of the repository is the name of that file. An index has no such file to go to: the
link goes to the `Repository` among pyproject's `[project.urls]` there, and without one its text alone stays.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|mailto:|#)([^)\s]*)\)")
_PROJECT = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
_REPOSITORY = _PROJECT.get("urls", {}).get("Repository")


def _absolute(link: re.Match[str]) -> str:
    image, text, target = link.groups()
    if _REPOSITORY is None:
        return text
    return f"{image}[{text}]({_REPOSITORY.rstrip('/')}/{'raw' if image else 'blob'}/HEAD/{target})"


setup(
    long_description=_LINK.sub(_absolute, Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
