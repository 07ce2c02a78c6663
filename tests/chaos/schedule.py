"""Which faults strike, when, and for how long: a list that follows from the seed alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Family = Literal["worker", "engine", "redis", "broker", "all"]


class Kind(StrEnum):
    """What may happen. The part before the dash says to what."""

    WORKER_KILL = "worker-kill"
    """SIGKILL to one worker, which is started again."""
    WORKER_TERM = "worker-term"
    """SIGTERM: it must exit with 0; it is started again."""
    WORKER_SLEEP = "worker-sleep"
    """SIGSTOP until the group has given its partitions to others, then SIGCONT."""
    WORKER_STORM = "worker-storm"
    """More workers join and leave, one after the other."""
    ENGINE_500 = "engine-500"
    ENGINE_503 = "engine-503"
    ENGINE_DROP = "engine-drop"
    """Connections are closed without an answer."""
    ENGINE_KILL = "engine-kill"
    REDIS_KILL = "redis-kill"
    """Killed and started again, empty."""
    REDIS_FREEZE = "redis-freeze"
    BROKER_FREEZE = "broker-freeze"
    """SIGSTOP, then SIGCONT: connections stay open and nothing is answered."""
    BROKER_KILL = "broker-kill"
    """SIGKILL, started again. Only one of three: a single node that dies between a transaction's end and its markers
    skips the markers when it starts (Kafka 4.3.1), and nobody reads past such a transaction."""

    ALL_CUT = "all-cut"
    """Every worker is killed while the brokers stand still: in the middle of what it asked of them."""

    @property
    def family(self) -> Family:
        return self.value.partition("-")[0]  # type: ignore[return-value]


WORKERS = 3
HOLD_S: dict[Kind, tuple[float, float]] = {
    Kind.WORKER_KILL: (0.0, 2.0),
    Kind.WORKER_TERM: (0.0, 1.0),
    Kind.WORKER_SLEEP: (7.0, 10.0),  # the session is 6 s
    Kind.WORKER_STORM: (0.5, 1.5),
    Kind.ENGINE_500: (1.0, 3.0),
    Kind.ENGINE_503: (1.0, 3.0),
    Kind.ENGINE_DROP: (1.0, 3.0),
    Kind.ENGINE_KILL: (1.0, 4.0),
    Kind.REDIS_KILL: (0.5, 2.0),
    Kind.REDIS_FREEZE: (1.0, 3.0),
    Kind.BROKER_FREEZE: (2.0, 8.0),
    Kind.BROKER_KILL: (0.5, 3.0),
    Kind.ALL_CUT: (0.5, 1.0),
}
"""Shortest and longest time between a fault's beginning and its end, seconds."""

FIRST, LAST = 0.04, 0.86
"""The shares of the tickets at which the first and the last fault strike; the rest shows that the stream goes on."""

TWO_AT_ONCE = 0.3
"""The chance that a fault strikes together with the one before it."""


@dataclass(frozen=True, slots=True)
class Fault:
    at: float
    """The share of all tickets that is settled when it strikes."""
    kind: Kind
    target: int
    """Which worker (0 to 2) or node (1 to 3); 0 where there is one only."""
    hold_s: float

    def __str__(self) -> str:
        named = self.kind.family in ("worker", "broker") and self.kind is not Kind.WORKER_STORM
        return f"{self.kind} {self.target}" if named else str(self.kind)


def plan(seed: int, nodes: int, count: int, kinds: Sequence[Kind]) -> tuple[Fault, ...]:
    """`count` faults, each of `kinds` among them at least once, and each of three brokers killed at least once where
    brokers are killed at all."""
    chance = random.Random(f"{seed}/{nodes}")
    wanted: list[tuple[Kind, int | None]] = []
    for kind in kinds:
        wanted += [(kind, node) for node in (1, 2, 3)] if kind is Kind.BROKER_KILL else [(kind, None)]
    if len(wanted) > count:
        raise ValueError(f"{count} faults cannot hold {len(wanted)} kinds")
    wanted += [(chance.choice(kinds), None) for _ in range(count - len(wanted))]
    chance.shuffle(wanted)
    lasting = [(kind, target, round(chance.uniform(*HOLD_S[kind]), 1)) for kind, target in wanted]
    total = sum(1.0 + hold_s for _, _, hold_s in lasting)
    faults: list[Fault] = []
    passed = 0.0
    for kind, target, hold_s in lasting:
        at = FIRST + (LAST - FIRST) * passed / total
        before = faults[-1] if faults else None
        if before is not None and _go_together(before.kind, kind) and chance.random() < TWO_AT_ONCE:
            alone = len(faults) < 2 or faults[-2].at != before.at
            at = before.at if alone else at
        faults.append(Fault(round(at, 4), kind, _target(kind, nodes, chance) if target is None else target, hold_s))
        passed += 1.0 + hold_s  # a long one gets more tickets, so that there is work while it lasts
    return tuple(faults)


def together(faults: Sequence[Fault]) -> tuple[tuple[Fault, ...], ...]:
    """In order, those that strike at once in one tuple."""
    groups: dict[float, list[Fault]] = {}
    for fault in faults:
        groups.setdefault(fault.at, []).append(fault)
    return tuple(tuple(group) for group in groups.values())


def _go_together(one: Kind, other: Kind) -> bool:
    return one.family != other.family and Kind.ALL_CUT not in (one, other)


def _target(kind: Kind, nodes: int, chance: random.Random) -> int:
    if kind.family == "broker":
        return chance.randint(1, nodes)
    return chance.randrange(WORKERS) if kind.family == "worker" else 0
