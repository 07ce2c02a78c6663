"""The lock files hold what pyproject.toml asks for, with hashes, and name no place to install from."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
RUNTIME: list[str] = PROJECT["project"]["dependencies"]
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
LOCKS: dict[str, list[str]] = {
    "runtime": RUNTIME,
    "embedded": RUNTIME + EXTRAS["embedded"],
    "dev": RUNTIME + [requirement for extra in EXTRAS.values() for requirement in extra],
    "build": PROJECT["build-system"]["requires"],
}

every_lock = pytest.mark.parametrize("name", LOCKS)


def text(name: str) -> str:
    return (ROOT / f"requirements/{name}.lock").read_text(encoding="utf-8")


def locked(name: str) -> dict[str, set[str]]:
    """Versions by package; several where the Python version decides."""
    found: dict[str, set[str]] = {}
    for package, version in re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", text(name), re.MULTILINE):
        found.setdefault(canonicalize_name(package), set()).add(version)
    return found


@every_lock
def test_a_lock_holds_what_the_project_asks_for(name: str) -> None:
    """Red means: run `make lock`."""
    versions = locked(name)
    for line in LOCKS[name]:
        wanted = Requirement(line)
        assert versions.get(canonicalize_name(wanted.name)), f"{line} is not in {name}.lock"
        assert all(wanted.specifier.contains(version) for version in versions[canonicalize_name(wanted.name)]), line


@every_lock
def test_every_locked_package_has_hashes(name: str) -> None:
    entries = re.split(r"^(?=[A-Za-z0-9])", text(name), flags=re.MULTILINE)[1:]
    assert entries
    assert not [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry]


@every_lock
def test_a_lock_names_no_place_to_install_from(name: str) -> None:
    assert not re.findall(r"[a-z]+://\S+|^-.*", text(name), re.MULTILINE)


@pytest.mark.parametrize("name", ["runtime", "embedded", "build"])
def test_what_is_shipped_is_what_was_tested(name: str) -> None:
    tested = locked("dev")
    assert not {
        package: versions for package, versions in locked(name).items() if not versions <= tested.get(package, versions)
    }


def test_the_worker_is_installed_without_the_offline_extra() -> None:
    assert not {"numpy", "scipy", "matplotlib", "pytest"} & set(locked("runtime"))
