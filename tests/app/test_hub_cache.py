"""`--model owner/name`: what a download left in the local cache, or a refusal; nothing is downloaded."""

import shutil

import pytest

from shared_specs.app.models.hub_cache import cache_folder
from shared_specs.app.models.weights import model_folder, read_model
from shared_specs.app.options import InputError
from tests.tiny_model import write_tiny_folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache as huggingface_hub lays it out: files in blobs, commits as folders of links, names of commits in refs."""
    for name in ("HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    place = tmp_path / "home" / "hub" / "models--owner--Tiny-1.5B"
    written, snapshot = write_tiny_folder(tmp_path / "model"), place / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (place / "blobs").mkdir()
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("c0ffee\n")
    for file in written.iterdir():
        shutil.move(file, place / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    monkeypatch.chdir(tmp_path)
    return place


def test_a_name_is_its_snapshot(cache):
    assert model_folder("owner/Tiny-1.5B") == cache / "snapshots" / "c0ffee"
    assert model_folder("owner/Tiny-1.5B@c0ffee") == cache / "snapshots" / "c0ffee"
    assert read_model("owner/Tiny-1.5B").config["hidden_size"] == 32


def test_a_folder_of_that_name_comes_first(cache, tmp_path):
    folder = write_tiny_folder(tmp_path / "owner" / "Tiny-1.5B", hidden_size=64)
    assert model_folder("owner/Tiny-1.5B").resolve() == folder
    assert read_model("owner/Tiny-1.5B").config["hidden_size"] == 64


@pytest.mark.parametrize("name", ["owner/other", "owner/Tiny-1.5B@v2", "owner/Tiny-1.5B@../../.."])
def test_what_is_not_there_is_refused_with_the_way_to_get_it(cache, name):
    with pytest.raises(
        InputError, match=r"^finetune: --model must be .*in the local hub cache, got owner/.* hf download own"
    ):
        read_model(name)


@pytest.mark.parametrize("name", ["absent", "a/b/c", "/absent/model", "owner/"])
def test_a_path_is_no_name(cache, name):
    with pytest.raises(InputError, match=r"--model must be a folder or a GGUF file, got .*, which does not exist\."):
        read_model(name)


def test_where_the_cache_is(monkeypatch, tmp_path):
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = [cache_folder()]
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
        found.append(cache_folder())
    assert found == [
        tmp_path / ".cache" / "huggingface" / "hub",
        tmp_path / "XDG_CACHE_HOME" / "huggingface" / "hub",
        tmp_path / "HF_HOME" / "hub",
        tmp_path / "HF_HUB_CACHE",
    ]
