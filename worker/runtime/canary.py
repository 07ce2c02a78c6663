"""Canaries: whether the rows of an engine's answer stand beside the tickets that they are about.

Rows in another order look like any other answer. So tickets whose scores are known go in with a batch now and then,
each at a random place: where one's row is another's, no row of that answer is believed, and every later one has to
prove itself in the same way until the engine has been right for a while.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker.core.primitives import Primitive
from worker.core.scores import LabelScores, ScoreRequest
from worker.errors import InvalidAnswer, RequestRefused, TooLong
from worker.ports import ScoringEngine

TOLERANCE = 0.15
"""In probability among the labels. An engine's own scores move by up to 0.01 between cold and warm state, alone and in
a batch (SGLang 0.5.23); with a bf16 head, whose log-probabilities are 1/8 nat apart, by up to 0.06."""
CLEARLY_DIFFERENT = 0.5
"""So far apart two canaries must be: each row is then within the tolerance of one of them at most."""
MOST = 3
WRONG_TO_OPEN = 3
"""Since the engine was last trusted or readmitted."""

OnCheck = Callable[[bool, str | None], None]
"""(whether every canary had its own row, the alarm as it stands now)."""


class MixedUp(InvalidAnswer):
    """Rows of this answer, or of one beside it, belong to other tickets."""


@dataclass(frozen=True, slots=True)
class Canary:
    """One ticket and what the engine said of it when it was asked about it alone."""

    request: ScoreRequest
    known: LabelScores


@dataclass(frozen=True, slots=True)
class Canaries:
    """Two or more that are clearly different, all of one question. `chance` is uniform in [0, 1)."""

    known: tuple[Canary, ...]
    chance: Callable[[], float]
    every_calls: int = 16
    """One call in so many carries them: half a per cent more work in batches of 32."""
    every_s: float = 30.0
    """After so long without, they are asked about by themselves."""
    trust_after_s: float = 300.0
    """An engine that mixed up rows must have been right for so long; one that does so now and then seems well soon."""

    def fit(self, requests: Sequence[ScoreRequest]) -> bool:
        """Whether they can go in with these. A ticket that is alone has no place to lose; and with company the engine
        would refuse it as one of several, without saying why."""
        first = self.known[0].request
        same = (requests[0].prefix, requests[0].label_token_ids) == (first.prefix, first.label_token_ids)
        return same and len(requests) > 1


class RowWatch:
    """One engine's calls. `alarm` is a sentence from the first wrong row until the engine is trusted again."""

    def __init__(self, engine: ScoringEngine, clock: Callable[[], float], on_check: OnCheck) -> None:
        self._engine = engine
        self._clock = clock
        self._on_check = on_check
        self.canaries: Canaries | None = None
        self.alarm: str | None = None
        self._wrong = 0
        self._wrong_ever = 0
        self._wrong_at = self._asked_at = float("-inf")
        self._calls = 0
        self._unproved = 0

    @property
    def is_overdue(self) -> bool:
        """Whether it is time to `check`."""
        return self.canaries is not None and (self.alarm is not None or self._waited_s >= self.canaries.every_s)

    @property
    def is_hopeless(self) -> bool:
        """Whether the engine should get no more tickets."""
        return self._wrong >= WRONG_TO_OPEN

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        """As ScoringEngine.score. Raises MixedUp too."""
        canaries = self.canaries
        if canaries is None:
            return await self._engine.score(requests)
        self._calls += 1
        if canaries.fit(requests):
            if self.alarm is not None or self._calls >= canaries.every_calls or self._waited_s >= canaries.every_s:
                return await self._with_canaries(canaries, requests)
        elif self.alarm is not None:
            await self._with_canaries(canaries, ())
        self._unproved += 1
        wrong = self._wrong_ever
        rows = await self._engine.score(requests)
        if self._wrong_ever != wrong:
            raise MixedUp("rows of another answer were found mixed up meanwhile")
        return rows

    async def check(self) -> None:
        """Asks about the canaries alone. Raises EngineError, MixedUp."""
        if self.canaries is not None:
            await self._with_canaries(self.canaries, ())

    def readmitted(self) -> None:
        """It gets tickets again; what it must prove stays."""
        self._wrong = 0

    @property
    def _waited_s(self) -> float:
        return self._clock() - self._asked_at

    async def _with_canaries(self, canaries: Canaries, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        self._calls, self._asked_at = 0, self._clock()  # before the answer: calls made meanwhile carry none
        asked: list[tuple[ScoreRequest, Canary | None]] = [(request, None) for request in requests]
        for canary in canaries.known:
            asked.insert(int(canaries.chance() * (len(asked) + 1)), (canary.request, canary))
        rows = await self._engine.score([request for request, _ in asked])
        if len(rows) != len(asked):
            raise InvalidAnswer(f"{len(rows)} rows for {len(asked)} requests")
        found = [(row, canary) for row, (_, canary) in zip(rows, asked, strict=True)]
        worst = max(distance(row, canary.known) for row, canary in found if canary is not None)
        self._judge(worst, canaries.trust_after_s)
        return [row for row, canary in found if canary is None]

    def _judge(self, worst: float, trust_after_s: float) -> None:
        if worst <= TOLERANCE:
            self._unproved = 0
            if self._clock() - self._wrong_at >= trust_after_s:
                self.alarm, self._wrong = None, 0
            self._on_check(True, self.alarm)
            return
        self._wrong_at = self._clock()
        self._wrong += 1
        self._wrong_ever += 1
        if self.alarm is None:
            self.alarm = (
                f"the row of a known ticket is another's (off by {worst:.2f}); {self._unproved} answers since its rows "
                "were last proved right may be mixed up too"
            )
        self._on_check(False, self.alarm)
        raise MixedUp(self.alarm)


def shares(scores: LabelScores) -> tuple[float, ...]:
    """Probabilities among the labels; 0 where one is unknown."""
    values = [0.0 if value is None else math.exp(value) for value in scores.returned]
    total = math.fsum(values)
    return tuple(value / total for value in values) if total > 0 else tuple(values)


def distance(one: LabelScores, other: LabelScores) -> float:
    """The largest difference of a probability among the labels; 1 for rows of different lengths."""
    if len(one.logprobs) != len(other.logprobs):
        return 1.0
    return max(abs(a - b) for a, b in zip(shares(one), shares(other), strict=True))


async def find_canaries(primitive: Primitive, texts: Sequence[str], engine: ScoringEngine) -> tuple[Canary, ...]:
    """Two or three of these canonical texts whose scores are clearly different and stay what they are, or none.

    Each is asked about alone, so that nothing can be mixed up. What cannot be scored is passed over. Raises
    EngineUnavailable, EngineDropped.
    """
    found: list[Canary] = []
    for request in dict.fromkeys(primitive.request(text) for text in texts):
        try:
            (known,) = await engine.score([request])
        except (RequestRefused, InvalidAnswer, TooLong):
            continue
        if all(distance(known, other.known) >= CLEARLY_DIFFERENT for other in found):
            (again,) = await engine.score([request])
            if distance(again, known) <= TOLERANCE / 3:  # the rest is room for what a batch changes
                found.append(Canary(request, known))
        if len(found) == MOST:
            break
    return tuple(found) if len(found) > 1 else ()
