"""Programs that only tests run: found on PATH, unpacked by `make system`, or built by Go once and kept in .cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache"
CONNECT = Path(__file__).with_name("connect")
KUSTOMIZE = "sigs.k8s.io/kustomize/kustomize/v5@v5.7.1"
BUILD_TIMEOUT_S = 900.0


def prometheus_program(name: str) -> Path:
    """`prometheus` or `promtool`."""
    found = shutil.which(name)
    unpacked = CACHE / "prometheus" / "usr" / "bin" / name
    if found is None and not unpacked.is_file():
        missing(f"{name} not found (`make system` unpacks it on Debian; elsewhere install Prometheus)")
    return Path(found or unpacked)


def kustomize() -> Path:
    """The pinned release; Go checks its sources against the checksum database."""
    folder = CACHE / "go" / KUSTOMIZE.rpartition("@")[2]
    if not (folder / "kustomize").is_file():
        _go(folder, ["install", KUSTOMIZE], ROOT)
    return folder / "kustomize"


def connect() -> Path:
    """Redpanda Connect's engine with stand-ins for Kafka; its sources are pinned by connect/go.sum."""
    sources = b"".join(path.read_bytes() for path in sorted(CONNECT.iterdir()))
    folder = CACHE / "go" / f"connect-{hashlib.sha256(sources).hexdigest()[:12]}"
    if not (folder / "connect").is_file():
        _go(folder, ["install", "-mod=readonly", "."], CONNECT)
    return folder / "connect"


def missing(what: str) -> NoReturn:
    """A failure in CI, a skip elsewhere."""
    if "CI" in os.environ:
        pytest.fail(what)
    pytest.skip(what)


def _go(folder: Path, arguments: list[str], cwd: Path) -> None:
    go = shutil.which("go")
    if go is None:
        missing("Go not found; it builds kustomize and the engine of Redpanda Connect for these tests")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
        environment = {**os.environ, "GOBIN": fresh, "CGO_ENABLED": "0"}
        built = subprocess.run(
            [go, *arguments],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
        if built.returncode != 0:
            pytest.fail(f"go {' '.join(arguments)}:\n{built.stderr[-3000:]}")
        folder.mkdir(exist_ok=True)
        for program in Path(fresh).iterdir():
            program.replace(folder / program.name)
