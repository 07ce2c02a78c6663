"""The error tree: each error is named by what the caller does next.

RouterError
├── ConfigError              stop; a person has to change something
│   ├── RuleSetError           ... in a rule set, at a file and line
│   ├── ArtefactError          ... in a calibration artefact
│   ├── PromptError            ... in the prompt: a chat template, or no room for a ticket
│   └── LabelError             ... in the labels, which are listed
├── InvalidTicket            dead-letter these bytes, once
├── InvalidQuestions         tell the client which parts of its request are wrong; nothing was asked
├── TooLong                  the ticket goes to people: it does not fit the model
├── EngineError
│   ├── EngineUnavailable      ask again later: nothing is wrong with the request
│   │   └── EngineSilent         ... no whole answer in time: perhaps this request's own doing, perhaps the engine's
│   ├── EngineDropped          the connection ended without an answer: perhaps this request's own doing
│   ├── RequestRefused         never again: the engine understood and said no
│   └── InvalidAnswer          never believe any part of this answer
├── StreamError
│   ├── StreamRetriable        settle the same again later
│   └── StreamFatal            end the process; the group gives the partitions to another worker
└── TooManyDeadLetters       end the process, settle nothing more; a person has to look at rules and topic
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class RouterError(Exception):
    """Root of everything this project raises on purpose."""


class ConfigError(RouterError):
    """Something a person must change before the worker may run; the message says what, where and how."""


class RuleSetError(ConfigError):
    """A rule set that cannot be obeyed.

    `where` is `file:line` as far as it is known.
    """

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


class ArtefactError(ConfigError):
    """A calibration artefact that cannot be read or was altered."""


class PromptError(ConfigError):
    """A prompt that cannot be put to this model: its chat template is another's, or no room is left for a ticket."""


class LabelError(ConfigError):
    """Labels that are not distinct single tokens behind the prompt."""

    SHOWN = 20

    def __init__(self, problem: str, offenders: Sequence[str]) -> None:
        more = f" and {len(offenders) - self.SHOWN} more" if len(offenders) > self.SHOWN else ""
        super().__init__(f"{problem}: {', '.join(offenders[: self.SHOWN])}{more}")
        self.problem = problem
        self.offenders = tuple(offenders)


class InvalidTicket(RouterError):
    """Bytes that are no ticket. `code` is one of the dead-letter reason codes in `core.envelope`."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one part of a request. `where` begins with `body`; the message says what to do, and quotes
    nothing of what was sent."""

    where: tuple[str | int, ...]
    message: str
    code: str


class InvalidQuestions(RouterError):
    """A request over HTTP whose questions cannot be asked. Its own text holds codes only, no words of the client."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(", ".join(problem.code for problem in problems))
        self.problems = tuple(problems)


class TooLong(RouterError):
    """A ticket that does not fit the model's context; it is a ticket, and people read it."""

    def __init__(self, tokens: int, limit: int, unit: str = "tokens") -> None:
        super().__init__(f"{tokens} {unit}, and {limit} fit")
        self.tokens = tokens
        self.limit = limit


class EngineError(RouterError):
    """The engine gave no usable scores."""


class EngineUnavailable(EngineError):
    """Refused connection, timeout, 429, 5xx: the same request may succeed later.

    `retry_after_s` is the engine's own wish, where it stated one.
    """

    def __init__(self, what: str, retry_after_s: float | None = None) -> None:
        super().__init__(what)
        self.retry_after_s = retry_after_s


class EngineSilent(EngineUnavailable):
    """No whole answer in time: the engine hangs or has too much, or hangs over one of the tickets in the request.

    `works` is whether it answered a probe afterwards, which took `probed_s`; None where that is not known.
    """

    def __init__(self, what: str, *, works: bool | None = None, probed_s: float = 0.0) -> None:
        super().__init__(what)
        self.works = works
        self.probed_s = probed_s


class EngineDropped(EngineError):
    """The connection closed without an answer; one of the tickets in the request may have ended the engine."""


class RequestRefused(EngineError):
    """A definite no (4xx) to this request: asking again cannot help."""

    def __init__(self, what: str, status: int | None = None) -> None:
        super().__init__(what)
        self.status = status


class InvalidAnswer(EngineError):
    """An answer that failed validation; nothing in it may be used."""


class StreamError(RouterError):
    """The broker or its client could not do what was asked."""


class StreamRetriable(StreamError):
    """Nothing was settled; settling the same again later is safe."""


class StreamFatal(StreamError):
    """This stream can do nothing more."""


class TooManyDeadLetters(RouterError):
    """Most of what comes in is no ticket to this worker: likelier a mistake in its rules than in all the messages."""
