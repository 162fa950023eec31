"""The description of the project on a package index; everything else is in pyproject.toml.

It is README.md, where a link to a file of the repository is the name of that file: an index has no such file to go to.
"""

import re
from pathlib import Path

from setuptools import setup

_LINK = re.compile(r"!?\[([^\]]*)\]\((?!https?://|mailto:|#)[^)\s]*\)")

setup(
    long_description=_LINK.sub(r"\1", Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
