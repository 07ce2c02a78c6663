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
    """

    def __init__(self, fd: int, notice: Callable[[int], bytes]) -> None:
        """`notice` makes the line that says how many were dropped; it is written with the next line that fits."""
        self._write_some = _writer(fd)
        self._notice = notice
        self._lock = threading.Lock()
        self._rest = b""
        """What is still to be written of a line that was begun."""
        self._unreported = 0
        self.dropped = 0

    def write(self, line: bytes) -> None:
        """`line` ends with a newline. Never waits, never raises."""
        with self._lock:
            before = self._rest
            if self._unreported:
                before += self._notice(self._unreported)
            data = before + line if before else line
            try:
                written = self._write_some(data) if len(line) <= MAX_LINE_BYTES else 0
            except OSError:
                written = 0
            if written == len(data):
                self._rest, self._unreported = b"", 0
            elif written > len(before):
                self._rest, self._unreported = data[written:], 0
            else:
                self._given_up(before, written)

    def _given_up(self, before: bytes, written: int) -> None:
        """The line found no room. What was begun before it is finished later; a notice not yet begun is made anew."""
        if written < len(self._rest):
            self._rest = self._rest[written:]
        elif written > len(self._rest):
            self._rest, self._unreported = before[written:], 0
        else:
            self._rest = b""
        self.dropped += 1
        self._unreported += 1


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
