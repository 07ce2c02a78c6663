"""Watchdog: alone knows when a worker that looks healthy has stood still for too long, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from worker.ports import Partition, Paused
from worker.runtime.offsets import Progress

LONGEST_STEP_S = 5.0
"""A longer time between two looks was not lived through: the process was stopped or the machine slept."""
CLIENT_S = 60.0
"""At least so long the Kafka client may take for one round: a settlement and a rebalance each have shorter limits."""


class What(StrEnum):
    """What can stand still."""

    ASSIGNMENT = "assignment"
    INTAKE = "intake"
    SCORING = "scoring"
    SETTLING = "settling"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class Standstill:
    """One thing that should have moved by now."""

    what: What
    partition: Partition | None
    """None where it is the worker as a whole."""
    sentence: str


@dataclass(frozen=True, slots=True)
class Sight:
    """What the worker sees of itself at one moment."""

    progress: Mapping[Partition, Progress]
    """Of every assigned partition."""
    lags: Mapping[Partition, int | None]
    """Messages behind the end; None or missing where that is not known."""
    paused: Paused
    asked: int
    """How often the stream's thread has come round."""
    engine_up: bool


@dataclass(slots=True)
class _Clock:
    """How long one thing has been owed; starts anew with each sign of progress."""

    sign: object = None
    owed_s: float = 0.0


_Key = tuple[What, Partition | None]
_State = Literal["owed", "excused", "nothing owed"]


@dataclass(slots=True)
class Watchdog:
    """Looks now and then (about once a second); `standstills` is what the last look found.

    A partition owes a delivery while messages wait for it and it is not paused, a score while its oldest ticket has
    none and an engine is up, and a settlement while its oldest ticket is finished. Pauses and outages of the engine are
    excused, whatever they last: meanwhile the clock stands still.
    """

    stalled_s: float
    unassigned_s: float
    ticket_deadline_s: float
    standstills: tuple[Standstill, ...] = ()
    _clocks: dict[_Key, _Clock] = field(default_factory=dict)
    _lags: Mapping[Partition, int | None] = field(default_factory=dict)
    _looked_at: float | None = None

    def look(self, now: float, sight: Sight) -> None:
        """`now` in seconds of any clock that does not go back."""
        step_s = 0.0 if self._looked_at is None else min(max(0.0, now - self._looked_at), LONGEST_STEP_S)
        self._looked_at = now
        before, self._clocks = self._clocks, {}
        found = []
        for key, sign, state in _owed(sight):
            clock = before.get(key)
            if clock is None or clock.sign != sign or state == "nothing owed" or self._came_closer(key, sight):
                clock = _Clock(sign)
            elif state == "owed":
                clock.owed_s += step_s
            self._clocks[key] = clock
            if state != "nothing owed" and clock.owed_s >= self._limit_s(key[0]):
                found.append(Standstill(*key, _sentence(key, clock.owed_s, sight)))
        self.standstills = tuple(found)
        self._lags = sight.lags

    def _came_closer(self, key: _Key, sight: Sight) -> bool:
        """Messages of aborted transactions are passed over without being delivered."""
        what, partition = key
        if what is not What.INTAKE or partition is None:
            return False
        before, now = self._lags.get(partition), sight.lags.get(partition)
        return before is not None and now is not None and now < before

    def _limit_s(self, what: What) -> float:
        match what:
            case What.ASSIGNMENT:
                return self.unassigned_s
            case What.SCORING:  # a ticket has its own deadline, which ends it in order
                return self.stalled_s + self.ticket_deadline_s
            case What.CLIENT:
                return max(self.stalled_s, CLIENT_S)
            case _:
                return self.stalled_s


def _owed(sight: Sight) -> list[tuple[_Key, object, _State]]:
    """Everything that can be owed, with what changes when it moves."""
    found: list[tuple[_Key, object, _State]] = [
        ((What.CLIENT, None), sight.asked, "owed"),
        ((What.ASSIGNMENT, None), None, "nothing owed" if sight.progress else "owed"),
    ]
    for partition, at in sight.progress.items():
        paused = sight.paused.everything or partition in sight.paused.partitions
        waiting: _State = "nothing owed" if sight.lags.get(partition) == 0 else "excused" if paused else "owed"
        scoring: _State = "nothing owed"
        settling: _State = "nothing owed"
        if at.oldest is not None and at.oldest_finished:
            settling = "owed"
        elif at.oldest is not None:
            scoring = "owed" if sight.engine_up else "excused"
        found += [
            ((What.INTAKE, partition), (at.epoch, at.newest), waiting),
            ((What.SCORING, partition), (at.epoch, at.oldest), scoring),
            ((What.SETTLING, partition), (at.epoch, at.oldest), settling),
        ]
    return found


def _sentence(key: _Key, owed_s: float, sight: Sight) -> str:
    what, partition = key
    since = f"for {owed_s:.0f} s"
    if partition is None:
        if what is What.CLIENT:
            return f"the Kafka client has not come back from a call {since}: restart the worker"
        return (
            f"no partition was assigned {since}: the group has more workers than the topic has partitions, or its "
            "coordinator does not answer"
        )
    where = f"partition {partition.topic}/{partition.number}"
    oldest = sight.progress[partition].oldest
    match what:
        case What.INTAKE:
            lag = sight.lags.get(partition)
            behind = "nobody knows how many messages wait" if lag is None else f"{lag} messages wait"
            return (
                f"{where}: {behind} and none came {since}: a transaction on the topic or on the group's offsets that "
                "does not end, or a partition without a leader"
            )
        case What.SCORING:
            return f"{where}: the ticket at offset {oldest} got neither a score nor an end {since}"
        case _:
            return f"{where}: finished tickets from offset {oldest} on could not be settled {since}"
