"""Logs: alone knows what a log line looks like and what must not get into one."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any, Final, Literal

import orjson
import structlog
from structlog.typing import FilteringBoundLogger, WrappedLogger

from worker.core.redaction import redacted
from worker.errors import RouterError
from worker.telemetry.log_sink import LogSink
from worker.telemetry.names import Attribute, Event

LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
FRAMES: Final = 8
LIBRARY_CHARS: Final = 500
_TEXTS: Final = (Attribute.TEXT, Attribute.DETAIL)
"""The attributes that hold what others wrote, or quote it."""

Render = Callable[[str, str, Mapping[str, Any]], bytes]
"""Time, level and fields (the event among them) to one line."""


def get_logger() -> FilteringBoundLogger:
    """The logger of whoever asks: `log.info(Event.DECIDED, action=...)`; keywords are those of `Attribute`."""
    logger: FilteringBoundLogger = structlog.get_logger()
    return logger


def kafka_logger() -> logging.Logger:
    """What the Kafka client logs to."""
    return logging.getLogger("kafka")


def set_up_logging(
    *,
    level: Literal["debug", "info", "warning", "error"],
    form: Literal["json", "console"],
    fd: int,
    clock: Callable[[], float],
    redact: bool = True,
) -> LogSink:
    """Sends all logs, those of libraries from warning on too, to the descriptor. `clock` gives Unix seconds.

    With `redact`, what is personal by its form is replaced where a line holds a text (core.redaction).
    """
    render = _json_line if form == "json" else _console_line

    def notice(count: int) -> bytes:
        fields = {"event": Event.LOG_LINES_DROPPED, Attribute.COUNT: count}
        return render(_timestamp(clock()), "warning", fields)

    sink = LogSink(fd, notice)
    stamped = (-1, "")

    def timestamp() -> str:
        nonlocal stamped
        unix_s = clock()
        millisecond = int(unix_s * 1000)
        if millisecond != stamped[0]:  # written once for all lines within it
            stamped = millisecond, _timestamp(unix_s)
        return stamped[1]

    def to_line(_: WrappedLogger, method: str, fields: MutableMapping[str, Any]) -> bytes:
        error = fields.pop("exc_info", None)
        if error is True:
            error = sys.exc_info()[1]
        if isinstance(error, BaseException):
            fields.update(describe_error(error))
        if redact:
            for name in _TEXTS:
                if isinstance(text := fields.get(name), str):
                    fields[name] = redacted(text)
        return render(timestamp(), method, fields)

    structlog.configure(
        processors=[to_line],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=lambda *_: _Lines(sink),
        cache_logger_on_first_use=True,
    )
    logging.raiseExceptions = False
    logging.captureWarnings(True)
    root = logging.getLogger()
    root.handlers[:] = [_Libraries(get_logger())]
    root.setLevel(max(logging.WARNING, LEVELS[level]))
    return sink


def describe_error(error: BaseException) -> dict[str, object]:
    """Type, place and, for our own errors, the sentence. Those of others may quote what they choked on."""
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    described: dict[str, object] = {
        Attribute.ERROR: type(error).__qualname__,
        Attribute.TRACE: [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames],
    }
    if isinstance(error, RouterError):
        described[Attribute.DETAIL] = str(error)
    return described


class _Lines:
    """What structlog calls with the finished line. What somebody may have to act on is never held back."""

    def __init__(self, sink: LogSink) -> None:
        self.debug = self.info = sink.write_soon
        self.warning = self.error = self.critical = self.exception = sink.write


class _Libraries(logging.Handler):
    """Hands on what libraries log through the standard library."""

    def __init__(self, log: FilteringBoundLogger) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()[:LIBRARY_CHARS]
        except (TypeError, ValueError):
            message = str(record.msg)[:LIBRARY_CHARS]
        fields: dict[str, Any] = {Attribute.LIBRARY: record.name, Attribute.DETAIL: message}
        if record.exc_info and record.exc_info[1] is not None:
            fields = {**describe_error(record.exc_info[1]), **fields}
        level = max(record.levelno // 10 * 10, logging.DEBUG)
        self._log.log(min(level, logging.ERROR), Event.LIBRARY, **fields)


def _timestamp(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _json_line(time: str, level: str, fields: Mapping[str, Any]) -> bytes:
    line = {"time": time, "level": level, "event": fields.get("event"), **fields}
    try:
        return orjson.dumps(line, default=_type_only, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a lone surrogate, a number beyond 64 bits, a key that is no plain str: no reason to fail
        readable = {
            str(key): ascii(value) if isinstance(value, str | int) else _type_only(value) for key, value in line.items()
        }
        return orjson.dumps(readable, option=orjson.OPT_APPEND_NEWLINE)


def _console_line(time: str, level: str, fields: Mapping[str, Any]) -> bytes:
    rest = "".join(f" {key}={_printable(value)}" for key, value in fields.items() if key != "event")
    return f"{time} {level:7} {_printable(fields.get('event'))}{rest}\n".encode(errors="replace")


def _printable(value: object) -> str:
    """No character that a terminal would obey."""
    text = str(value) if isinstance(value, str | int | float | bool | list | None) else _type_only(value)
    return text if text.isprintable() else ascii(text)


def _type_only(value: object) -> str:
    """Bytes and objects could be a ticket: only what they are is said."""
    return f"<{type(value).__name__}>"
