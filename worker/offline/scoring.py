"""Scoring: labelled tickets through the engine once, and a journal from which a second run goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

import orjson

from worker.adapters.files import Labelled
from worker.core.budget import Fitted
from worker.core.canonicalisers import scored_text
from worker.core.digest import fingerprint
from worker.core.normalise import canonical
from worker.core.scores import LabelScores, ScoreRequest
from worker.core.ticket import Ticket
from worker.errors import (
    ConfigError,
    EngineDropped,
    EngineUnavailable,
    InvalidAnswer,
    RequestRefused,
    TooLong,
)
from worker.ports import ScoringEngine
from worker.runtime.question import Question, score_texts

Progress = Callable[[int, int], None]
"""(done, total)."""
Sleep = Callable[[float], Awaitable[None]]

ATTEMPTS = 6
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0


@dataclass(frozen=True, slots=True)
class ScoredTicket:
    """One labelled ticket with its label scores, or the reason why there are none.

    `text` is canonical, and whole: what was scored may be less (core.canonicalisers). `label` is an index in label
    order, -1 for a ticket of no category of the set (and where scores alone were asked for). `logprobs` (nats, label
    order) are empty where there is a `problem`: a reason code of `core.policy`, or `no_text` where nothing is left to
    read.
    """

    id: str
    text: str
    label: int
    language: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    logprobs: tuple[float, ...] = ()
    mass: float = 0.0
    problem: str | None = None
    unknown: tuple[int, ...] = ()
    """As in LabelScores: places whose log-probability is an upper bound only."""

    @property
    def scores(self) -> LabelScores:
        """Raises ValueError where there are none."""
        if self.problem is not None:
            raise ValueError(f"ticket {self.id} has no scores: {self.problem}")
        return LabelScores(self.logprobs, self.mass, self.unknown)

    @property
    def ticket(self) -> Ticket:
        """What the overrides are asked about; tenant and channel stand in the metadata of a labelled file."""
        return Ticket(
            id=self.id,
            text=self.text,
            tenant=self.metadata.get("tenant"),
            channel=self.metadata.get("channel"),
            language=self.language,
            metadata=self.metadata,
        )


async def score_labelled(
    question: Question,
    engine: ScoringEngine,
    tickets: Sequence[Labelled],
    journal: Path | None,
    batch_items: int,
    progress: Progress,
    *,
    sleep: Sleep,
    turn: int = 0,
) -> list[ScoredTicket]:
    """Every ticket with its scores, in the order given; equal texts are asked about once.

    With a `journal` each answer is on disk before the next is asked for, and a later run with the same fingerprints
    asks only for what is missing. `turn` 1, 2, ... asks again and in another order, so that every ticket has other
    neighbours in its batch: what differs between turns is the engine's own noise. Raises EngineUnavailable where the
    engine stays away, ConfigError where the journal cannot be written; what was scored until then is kept.
    """
    index = {category: i for i, category in enumerate(question.rule_set.categories.ids)}
    left_out = question.rule_set.categories.prompt.canonicalise
    whole = [scored_text(ticket.text, left_out) for ticket in tickets]
    read = {text: await _read(question, engine, text, sleep) for text in dict.fromkeys(whole) if text}
    texts = [fitted.text if isinstance(fitted := read.get(text, ""), Fitted) else "" for text in whole]
    with ScoreJournal(journal, question, turn) as recorded:
        asked = [text for text in dict.fromkeys(texts) if text]
        open_texts = [text for text in asked if text not in recorded]
        if turn > 0:
            open_texts.sort(key=lambda text: _shuffled(text, turn))
        found: dict[str, LabelScores | str] = {text: recorded[text] for text in asked if text in recorded}
        progress(len(found), len(asked))
        for start in range(0, len(open_texts), batch_items):
            chunk = open_texts[start : start + batch_items]
            answers = await _ask(question, engine, chunk, sleep)
            recorded.add({text: row for text, row in answers.items() if isinstance(row, LabelScores)})
            found.update(answers)
            progress(len(found), len(asked))
    unread = [problem if isinstance(problem := read.get(text, "no_text"), str) else None for text in whole]
    return [
        _scored(ticket, problem or found[text], index.get(ticket.label, -1))
        for ticket, text, problem in zip(tickets, texts, unread, strict=True)
    ]


async def _read(question: Question, engine: ScoringEngine, text: str, sleep: Sleep) -> Fitted | str:
    """What the worker would read of a text, or the reason code under which it would not route it."""
    reader = question.reader(engine.tokenize)
    if reader is None:
        return Fitted(text, cut=False)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            fitted = await reader.fit(text)
        except EngineUnavailable:
            if attempt == ATTEMPTS:
                raise
            await sleep(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (attempt - 1)))
        except (RequestRefused, EngineDropped, InvalidAnswer, TooLong) as error:
            return _code(error)
        else:
            escalates = fitted.cut and question.rule_set.rules.length.when_cut == "escalate"
            return "truncated" if escalates else fitted
    raise AssertionError("the last attempt returns or raises")


def _scored(ticket: Labelled, answer: LabelScores | str, label: int) -> ScoredTicket:
    own = (ticket.id, canonical(ticket.text), label, ticket.language, dict(ticket.metadata or {}))
    if isinstance(answer, str):
        return ScoredTicket(*own, problem=answer)
    return ScoredTicket(*own, logprobs=answer.logprobs, mass=answer.mass, unknown=answer.unknown)


async def _ask(
    question: Question, engine: ScoringEngine, texts: Sequence[str], sleep: Sleep
) -> dict[str, LabelScores | str]:
    """Scores or reason code of each text. Raises EngineUnavailable after the last attempt.

    A call that fails over one of its tickets is halved until that one is alone: its neighbours are scored.
    """

    async def ask(requests: Sequence[ScoreRequest]) -> Mapping[ScoreRequest, LabelScores | str]:
        return await ask_engine(engine, requests, sleep)

    return await score_texts(question.primitive, texts, ask)


async def ask_engine(
    engine: ScoringEngine, requests: Sequence[ScoreRequest], sleep: Sleep
) -> dict[ScoreRequest, LabelScores | str]:
    """Scores or reason code of each request; all share prefix and labels. Raises EngineUnavailable after the last
    attempt."""
    try:
        rows = await _patiently(engine, requests, sleep)
        if len(rows) != len(requests):
            raise InvalidAnswer(f"{len(rows)} rows for {len(requests)} requests")
        return dict(zip(requests, (row.checked() for row in rows), strict=True))
    except (RequestRefused, EngineDropped, InvalidAnswer, TooLong, ValueError) as error:
        if len(requests) == 1:
            return {requests[0]: _code(error)}
    middle = len(requests) // 2
    first = await ask_engine(engine, requests[:middle], sleep)
    return {**first, **await ask_engine(engine, requests[middle:], sleep)}


async def _patiently(engine: ScoringEngine, requests: Sequence[ScoreRequest], sleep: Sleep) -> Sequence[LabelScores]:
    """Asks again while the engine is away, and once more where it dropped the connection over a single ticket."""
    dropped = False
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return await engine.score(requests)
        except EngineUnavailable as error:
            if attempt == ATTEMPTS:
                raise
            backoff_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (attempt - 1))
            await sleep(max(backoff_s, min(error.retry_after_s or 0.0, LONGEST_BACKOFF_S)))
        except EngineDropped:
            if dropped or len(requests) > 1 or attempt == ATTEMPTS:
                raise
            dropped = True
            await sleep(FIRST_BACKOFF_S)
    raise AssertionError("the last attempt returns or raises")


def _code(error: Exception) -> str:
    match error:
        case TooLong():
            return "too_long"
        case RequestRefused():
            return "engine_refused"
        case EngineDropped():
            return "engine_dropped"
        case _:
            return "invalid_answer"


def _shuffled(text: str, turn: int) -> bytes:
    return hashlib.sha256(f"turn {turn}\x00{text}".encode(errors="surrogatepass")).digest()


class ScoreJournal:
    """Scores by canonical text, as JSON Lines: rows of other fingerprints and turns stand beside these unharmed.

    Only scores are kept: a ticket that was refused or too long is asked about again. A last line that was cut off is
    removed, a line that cannot be read is passed over; both tickets are scored again.
    """

    def __init__(self, path: Path | None, question: Question, turn: int) -> None:
        self._path = path
        self._size = len(question.primitive.labels.words)
        self._asked = fingerprint("scores/1", *question.fingerprints.model_dump().values(), turn)
        self._rows: dict[str, LabelScores] = {}
        self._file: IO[bytes] | None = None

    def __enter__(self) -> ScoreJournal:
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a+b")
                self._read(self._file)
            except OSError as error:
                raise ConfigError(f"{self._path}: the score journal cannot be used: {error.strerror}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def __contains__(self, text: str) -> bool:
        return self._key(text) in self._rows

    def __getitem__(self, text: str) -> LabelScores:
        return self._rows[self._key(text)]

    def add(self, answers: Mapping[str, LabelScores]) -> None:
        """Raises ConfigError."""
        if self._file is None or not answers:
            return
        lines = [
            orjson.dumps(
                {"key": self._key(text), "logprobs": row.logprobs, "mass": row.mass}
                | ({"unknown": row.unknown} if row.unknown else {})
            )
            + b"\n"
            for text, row in answers.items()
        ]
        try:
            self._file.write(b"".join(lines))
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"{self._path}: scores cannot be written: {error.strerror}") from error

    def _read(self, file: IO[bytes]) -> None:
        file.seek(0)
        whole = 0
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(whole)
                break
            whole += len(line)
            try:
                row = orjson.loads(line)
                unknown = tuple(map(int, row.get("unknown", ())))
                scores = LabelScores(tuple(map(float, row["logprobs"])), float(row["mass"]), unknown).checked()
            except (ValueError, KeyError, TypeError):
                continue
            if len(scores.logprobs) == self._size:
                self._rows[row["key"]] = scores

    def _key(self, text: str) -> str:
        return fingerprint(self._asked, text.encode(errors="surrogatepass"))
