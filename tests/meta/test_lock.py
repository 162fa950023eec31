"""The locks are complete and consistent, and what pyproject.toml asks for admits both supported sets of versions."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Which lock is complete for which Python.
LOCK_FOR = {(3, 11): "main.txt", (3, 12): "new-jax.txt", (3, 13): "new-jax.txt"}

# What the two supported sets differ in; the first is main.txt and no-deps.txt, the second is what GPU machines have.
SUPPORTED = [
    {"python": "3.11", "torch": "2.13.0", "triton": "3.9.0", "jax": "0.10.2", "flax": "0.12.8"},
    {"python": "3.12", "torch": "2.11.0", "triton": "3.6.0", "jax": "0.11.2", "flax": "0.12.12"},
]

# A CUDA build of torch brings these; they are neither needed nor pinned, and the lock does not say which build it is.
CUDA_BUILD = ("nvidia-", "cuda-", "triton")


def requirements(lock: Path) -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in lock.read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def pins(*names: str) -> dict[str, Version]:
    """Canonical name -> pinned version of the named locks together."""
    found = [r for name in names for r in requirements(ROOT / "requirements" / name)]
    return {canonicalize_name(r.name): Version(str(r.specifier).removeprefix("==")) for r in found}


def unlocked(report: dict, locked: dict[str, Version]) -> list[str]:
    """What pip's report would install although the lock does not pin it so."""
    metadata = [item["metadata"] for item in report["install"]]
    would: dict[str, str] = {canonicalize_name(each["name"]): each["version"] for each in metadata}
    plain_torch = "torch" in would and not Version(would["torch"]).local
    extra = [
        f"{name}=={version}"
        for name, version in would.items()
        if locked.get(name) != Version(Version(version).public) and not (plain_torch and name.startswith(CUDA_BUILD))
    ]
    return sorted(extra + [f"{name} is never installed" for name in locked.keys() - would.keys()])


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_every_line_is_one_exact_pin(lock):
    names = []
    for requirement in requirements(lock):
        (specifier,) = requirement.specifier
        assert (specifier.operator, "*" in specifier.version) == ("==", False), requirement
        assert (requirement.url, requirement.marker, requirement.extras) == (None, None, set()), requirement
        assert Version(specifier.version).local is None, "a local version such as +cpu exists on some indexes only"
        names.append(canonicalize_name(requirement.name))
    assert len(names) == len(set(names)) > 0


@pytest.mark.slow  # make lock asks the index for both Pythons
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.version_info[:2] not in LOCK_FOR, reason="there is no lock for this Python")
def test_the_lock_of_this_python_resolves_to_itself(tmp_path):
    name, report = LOCK_FOR[sys.version_info[:2]], tmp_path / "report.json"
    command = ["-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", str(report)]
    lock = ROOT / "requirements" / name
    run = subprocess.run([sys.executable, *command, "-r", str(lock)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert unlocked(json.loads(report.read_text()), pins(name)) == []


def test_the_comparison_with_the_lock_can_fail():
    def report(**versions):
        return {"install": [{"metadata": {"name": n.replace("_", "-"), "version": v}} for n, v in versions.items()]}

    locked = {"torch": Version("2.13.0"), "numpy": Version("2.4.6")}
    assert unlocked(report(torch="2.13.0+cpu", numpy="2.4.6"), locked) == []
    assert unlocked(report(torch="2.13.0", numpy="2.4.6", nvidia_nccl="2.1", triton="3.7.1"), locked) == []
    assert unlocked(report(torch="2.13.0+cpu", numpy="2.4.6", triton="3.7.1"), locked) == ["triton==3.7.1"]
    assert unlocked(report(torch="2.13.0+cpu", numpy="2.4.6", six="1.17"), locked) == ["six==1.17"]
    assert unlocked(report(torch="2.13.0+cpu", numpy="2.4.5"), locked) == ["numpy==2.4.5"]
    assert unlocked(report(torch="2.13.0+cpu"), locked) == ["numpy is never installed"]


def wanted(*extras: str) -> list[Requirement]:
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    parsed = [Requirement(text) for texts in lists for text in texts]
    return [requirement for requirement in parsed if requirement.name != PROJECT["name"]]


@pytest.mark.parametrize(
    ("locks", "extras"),
    [
        (["main.txt", "no-deps.txt"], ["torch", "jax", "hf", "cli", "demo", "test"]),
        (["main.txt", "bench.txt"], ["bench"]),
        (["new-jax.txt"], ["jax", "cli"]),
        (["main.txt", "docs.txt"], ["docs"]),
    ],
)
def test_the_locks_hold_what_the_extras_ask_for(locks, extras):
    locked = pins(*locks)
    missing = [
        str(r) for r in wanted(*extras) if locked.get(canonicalize_name(r.name), Version("0")) not in r.specifier
    ]
    assert missing == []


@pytest.mark.parametrize("versions", SUPPORTED, ids=lambda versions: f"python{versions['python']}")
def test_the_ranges_admit_both_supported_sets(versions):
    ranges = {requirement.name: requirement.specifier for requirement in wanted("torch", "jax")}
    ranges["python"] = Requirement(f"python{PROJECT['requires-python']}").specifier
    assert [name for name, version in versions.items() if version not in ranges[name]] == []


def test_the_supported_sets_are_the_locked_ones():
    first, second, third = pins("main.txt", "no-deps.txt"), pins("new-jax.txt"), pins("old-torch.txt")
    assert {name: str(first[name]) for name in ("torch", "triton", "jax", "flax")}.items() <= SUPPORTED[0].items()
    assert {name: str(second[name]) for name in ("jax", "flax")}.items() <= SUPPORTED[1].items()
    assert {name: str(third[name]) for name in ("torch", "triton", "jax", "flax")}.items() <= SUPPORTED[1].items()


def test_all_names_every_other_extra_that_a_user_has_use_for():
    extras = PROJECT["optional-dependencies"]
    (everything,) = (Requirement(text) for text in extras["all"])
    assert everything.extras == extras.keys() - {"all", "demo", "docs"}  # demo has to compile what nobody here calls
