"""Log sink: alone knows how to write lines to a file descriptor without ever waiting for whoever reads them."""

from __future__ import annotations

import os
import select
import socket
import stat
import threading
from collections.abc import Callable
from typing import Final

PIPE_BUF: Final = select.PIPE_BUF
MAX_LINE_BYTES: Final = 64 * 1024


class LogSink:
    """Whole lines, or none: a full pipe, a full disk or a reader that has gone costs lines, which are counted.

    The descriptor's own flags stay as they are, because other processes may share them. On a regular file a write waits
    for the disk, which cannot be avoided without a thread. Safe to use from several threads.

    A call of the system for each line costs more than all else about it: see `gather`.
    """

    def __init__(self, fd: int, notice: Callable[[int], bytes]) -> None:
        """`notice` makes the line that says how many were dropped; it is written with the next line that fits."""
        self._write_some = _writer(fd)
        self._notice = notice
        self._lock = threading.RLock()
        self._busy = False
        self._late: list[bytes] = []
        """Lines that were logged in the middle of all this, by what the collector of cycles finalised just then."""
        self._rest = b""
        """What is still to be written of a line that was begun."""
        self._unreported = 0
        self._soon: Callable[[Callable[[], None]], object] | None = None
        self._gathering = -1
        """The thread whose lines are gathered."""
        self._gathered: list[bytes] = []
        self._room = PIPE_BUF
        self.dropped = 0

    def gather(self, soon: Callable[[Callable[[], None]], object]) -> None:
        """From now on `write_soon` on this thread gathers lines until `soon`, such as an event loop's `call_soon`,
        calls back, and never more than a pipe takes as one."""
        with self._lock:
            self._soon, self._gathering = soon, threading.get_ident()

    def gather_no_more(self) -> None:
        """Every line is written at once again."""
        with self._lock:
            self._soon, self._gathering = None, -1
        self._write_gathered()

    def write_soon(self, line: bytes) -> None:
        """`line` ends with a newline. Never waits, never raises. Behind all that was written before."""
        self._do(self._take, line)

    def write(self, line: bytes) -> None:
        """As `write_soon`, at once."""
        self._do(self._take_at_once, line)

    def _write_gathered(self) -> None:
        self._do(self._take_at_once, None)

    def _do(self, take: Callable[[bytes | None], None], line: bytes | None) -> None:
        with self._lock:
            if self._busy:
                if line is not None:
                    self._late.append(line)
                return
            self._busy = True
            try:
                take(line)
                while self._late:
                    late, self._late = self._late, []
                    self._flush()
                    self._put(late)
            finally:
                self._busy = False

    def _take(self, line: bytes | None) -> None:
        soon = self._soon
        if line is None or soon is None or threading.get_ident() != self._gathering:
            self._take_at_once(line)
            return
        if len(line) > self._room:
            self._flush()
        if not self._gathered:
            soon(self._write_gathered)
        self._gathered.append(line)
        self._room -= len(line)

    def _take_at_once(self, line: bytes | None) -> None:
        self._flush()
        if line is not None:
            self._put([line])

    def _flush(self) -> None:
        if self._gathered:
            lines, self._gathered, self._room = self._gathered, [], PIPE_BUF
            self._put(lines)

    def _put(self, lines: list[bytes]) -> None:
        before = self._rest
        if self._unreported:
            before += self._notice(self._unreported)
        fit = [line for line in lines if len(line) <= MAX_LINE_BYTES]
        data = b"".join((before, *fit))
        try:
            written = self._write_some(data) if fit else 0
        except OSError:
            written = 0
        if written < len(before) or not fit:
            self._not_even(before, written)
            self._drop(len(lines))
            return
        self._rest, self._unreported = b"", 0
        end, whole = len(before), 0
        for line in fit:
            if end >= written:
                break
            end += len(line)
            whole += 1
        self._rest = data[written:end]
        self._drop(len(lines) - whole)

    def _not_even(self, before: bytes, written: int) -> None:
        """What was begun before found no room. It is finished later; a notice that is not yet begun is made anew."""
        if written < len(self._rest):
            self._rest = self._rest[written:]
        elif written > len(self._rest):
            self._rest, self._unreported = before[written:], 0
        else:
            self._rest = b""

    def _drop(self, lines: int) -> None:
        self.dropped += lines
        self._unreported += lines


def _writer(fd: int) -> Callable[[bytes], int]:
    """Writes what there is room for, and says how much that was; raises OSError."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return lambda data: os.write(fd, data)
    if stat.S_ISSOCK(mode):
        # MSG_DONTWAIT concerns one call, not the socket that others may share.
        connection = socket.socket(fileno=os.dup(fd))
        return lambda data: connection.send(data, socket.MSG_DONTWAIT)
    try:
        # A second open of the same pipe or terminal has flags of its own, which a duplicate has not.
        own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # no /proc, a pipe of another user, a named pipe without a reader
        return _polled_writer(fd)
    return lambda data: os.write(own, data)


def _polled_writer(fd: int) -> Callable[[bytes], int]:
    """For a descriptor that may block: a pipe that polls as writable takes PIPE_BUF bytes without waiting."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)

    def write(data: bytes) -> int:
        written = 0
        while written < len(data) and poll.poll(0):
            written += os.write(fd, data[written : written + PIPE_BUF])
        return written

    return write
