"""A model's name on the Hugging Face hub, such as HuggingFaceTB/SmolLM2-135M, as the folder that a download left behind."""

import os
import re
from pathlib import Path

from shared_specs.app.options import InputError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def cache_folder() -> Path:
    """Return where the hub's own library keeps what it downloads: HF_HUB_CACHE, else below HF_HOME, else in ~/.cache."""
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        home = str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(home).expanduser() / "hub"


def cached_model(name: str, command: str) -> Path:
    """Return the snapshot of a model in the local cache; nothing is downloaded.

    Args:
        name: owner/model, or owner/model@revision; without one what "main" was at the last download.
        command: for messages.
    Raises:
        InputError: it is not there.
    """
    model, _, revision = name.partition("@")
    place = cache_folder() / f"models--{model.replace('/', '--')}"
    commit = place / "refs" / (revision or "main")
    found = place / "snapshots" / (commit.read_text().strip() if commit.is_file() else revision or "main")
    if (found / "config.json").is_file():
        return found
    advice = f"Nothing is downloaded here: do it with hf download {model}"
    advice += f" --revision {revision}" * bool(revision)
    raise InputError(
        f"{command}: --model must be a folder, a GGUF file or a model in the local hub cache, got {name}, which is neither "
        f"in this folder nor in {cache_folder()}. {advice}."
    )


def is_hub_name(text: str) -> bool:
    """Return whether this can be the name of a model on the hub: owner/model, and a revision behind an @."""
    return _NAME.fullmatch(text.partition("@")[0]) is not None
