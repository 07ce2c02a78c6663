"""A child process that ends when this process does, however this process ends."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

# The watcher reads a pipe that only this process holds open. Its end, also by SIGKILL, closes the pipe; a line in it
# sends the watcher away. prctl(PR_SET_PDEATHSIG) would need code between fork and exec, next to librdkafka's threads,
# and would fire at the end of the starting thread rather than of the process.
_SCRIPT = 'exec 3<&0 </dev/null; { read -r _ <&3 || kill -KILL "$$"; } & exec "$@" 3<&-'


class TiedProcess:
    """Runs `command`; its output goes to `log`, or nowhere."""

    def __init__(self, command: Sequence[str], *, cwd: Path | None = None, log: Path | None = None) -> None:
        output = log.open("ab") if log is not None else None
        try:
            self._process = subprocess.Popen(  # noqa: S603  # no shell sees the command: it is the script's "$@"
                ["/bin/sh", "-c", _SCRIPT, "sh", *command],
                stdin=subprocess.PIPE,
                stdout=output or subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                cwd=cwd,
            )
        finally:
            if output is not None:
                output.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def stop(self, timeout_s: float = 10.0) -> int:
        """SIGTERM, then SIGKILL; returns the exit code."""
        if self.returncode is None:
            self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        return self._ended()

    def kill(self) -> int:
        """SIGKILL; returns the exit code."""
        self._process.kill()
        return self._ended()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def _ended(self) -> int:
        code = self._process.wait()
        pipe = self._process.stdin
        if pipe is not None and not pipe.closed:
            try:
                pipe.write(b"\n")
                pipe.close()
            except BrokenPipeError:  # the watcher is gone already
                pass
        return code
