"""Watchdog: what stands still is named in time, and nothing that is idle, paused, waiting or just slow is."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from worker.ports import Partition, Paused
from worker.runtime.offsets import Progress
from worker.runtime.watchdog import CLIENT_S, LONGEST_STEP_S, Sight, Watchdog, What

STALLED_S, UNASSIGNED_S, DEADLINE_S = 20.0, 30.0, 10.0
ONE, TWO = Partition("tickets", 1), Partition("tickets", 2)


@dataclass
class Scene:
    """A worker as the watchdog sees it, and a clock; by default everything is idle and well."""

    progress: dict[Partition, Progress] = field(default_factory=lambda: {ONE: Progress(1, None, None)})
    lags: dict[Partition, int | None] = field(default_factory=lambda: {ONE: 0, TWO: 0})
    paused: Paused = field(default_factory=Paused)
    engine_up: bool = True
    client_works: bool = True
    asked: int = 0
    now: float = 1_000.0
    dog: Watchdog = field(default_factory=lambda: Watchdog(STALLED_S, UNASSIGNED_S, DEADLINE_S))

    def look(self, seconds: float = 0.0) -> list[tuple[What, Partition | None]]:
        """What stands still after so many more seconds, looked at once a second as the worker does."""
        for step in range(int(seconds) + 1):
            self.now += 1.0 if step else 0.0
            self.asked += self.client_works
            sight = Sight(dict(self.progress), dict(self.lags), self.paused, self.asked, self.engine_up)
            self.dog.look(self.now, sight)
        return [(each.what, each.partition) for each in self.dog.standstills]


def test_an_idle_worker_stands_still_for_ever_and_nobody_minds() -> None:
    assert Scene().look(10_000) == []


def test_messages_that_wait_and_do_not_come_are_named_until_one_comes() -> None:
    scene = Scene(lags={ONE: 3})
    assert scene.look(STALLED_S - 1) == []
    assert scene.look(2) == [(What.INTAKE, ONE)]
    (found,) = scene.dog.standstills
    assert "partition tickets/1" in found.sentence
    assert "3 messages wait" in found.sentence
    scene.progress[ONE] = Progress(1, 7, None)
    assert scene.look(1) == []
    assert scene.look(STALLED_S) == [(What.INTAKE, ONE)], "the clock starts anew"


def test_a_partition_of_which_nothing_is_known_is_no_idle_partition() -> None:
    scene = Scene(lags={})
    assert scene.look(STALLED_S + 1) == [(What.INTAKE, ONE)]
    assert "nobody knows" in scene.dog.standstills[0].sentence
    scene.lags[ONE] = 0
    assert scene.look() == []


def test_messages_that_are_passed_over_are_progress() -> None:
    scene = Scene(lags={ONE: 1_000})
    for lag in range(999, 0, -10):
        scene.lags[ONE] = lag
        assert scene.look(STALLED_S / 2) == []


@pytest.mark.parametrize("paused", [Paused(everything=True), Paused(partitions=frozenset({ONE}))])
def test_a_pause_is_an_excuse_whatever_it_lasts_and_does_not_wind_the_clock_back(paused: Paused) -> None:
    scene = Scene(lags={ONE: 3})
    scene.look(STALLED_S / 2)
    scene.paused = paused
    assert scene.look(1_000) == []
    scene.paused = Paused()
    assert scene.look(STALLED_S / 2 + 1) == [(What.INTAKE, ONE)]


def test_a_finished_ticket_that_is_not_settled_is_named_even_while_paused_and_without_engine() -> None:
    scene = Scene(paused=Paused(everything=True), engine_up=False, lags={ONE: 3})
    scene.progress[ONE] = Progress(1, 9, 5, oldest_finished=True)
    assert scene.look(STALLED_S + 1) == [(What.SETTLING, ONE)]
    assert "offset 5" in scene.dog.standstills[0].sentence
    scene.progress[ONE] = Progress(1, 9, 6, oldest_finished=True)
    assert scene.look(1) == []


def test_a_ticket_at_the_engine_has_its_own_deadline_first_and_an_outage_does_not_count() -> None:
    scene = Scene()
    scene.progress[ONE] = Progress(1, 5, 5)
    assert scene.look(STALLED_S) == []
    scene.engine_up = False
    assert scene.look(1_000) == []
    scene.engine_up = True
    assert scene.look(DEADLINE_S + 1) == [(What.SCORING, ONE)]


def test_a_new_assignment_starts_anew() -> None:
    scene = Scene(lags={ONE: None, TWO: 0})
    scene.look(STALLED_S - 1)
    scene.progress[ONE] = Progress(2, None, None)
    assert scene.look(STALLED_S - 1) == []
    scene.progress = {TWO: Progress(3, None, None)}
    assert scene.look(STALLED_S) == []


def test_a_worker_without_partitions_is_told_of() -> None:
    scene = Scene(progress={})
    assert scene.look(UNASSIGNED_S - 1) == []
    assert scene.look(2) == [(What.ASSIGNMENT, None)]
    scene.progress = {ONE: Progress(1, None, None)}
    assert scene.look() == []


def test_a_client_that_does_not_come_back_is_told_of() -> None:
    scene = Scene()
    scene.look(5)
    scene.client_works = False
    assert scene.look(CLIENT_S - 1) == []
    assert scene.look(2) == [(What.CLIENT, None)]
    scene.client_works = True
    assert scene.look(1) == []


def test_time_in_which_the_process_did_not_run_is_not_held_against_it() -> None:
    scene = Scene(lags={ONE: 3})
    scene.look(STALLED_S - LONGEST_STEP_S - 2)
    scene.now += 100_000
    assert scene.look() == []
    assert scene.look(2) == [(What.INTAKE, ONE)]


class World:
    """Partitions with messages, tickets and faults, a second at a time; `stuck` is what never moves from now on."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.scene = Scene(progress={}, lags={})
        self.epoch = 0
        self.owed: dict[tuple[What, Partition], float] = {}
        self.stuck: tuple[What, Partition] | None = None
        for number in range(4):
            self.assign(Partition("tickets", number))

    def assign(self, partition: Partition) -> None:
        self.epoch += 1
        self.scene.progress[partition] = Progress(self.epoch, None, None)
        self.scene.lags[partition] = None
        for what in What:
            self.owed.pop((what, partition), None)

    def second(self) -> list[tuple[What, Partition | None]]:
        chance, scene = self.chance, self.scene
        if chance.random() < 0.02:
            scene.engine_up = not scene.engine_up
        if chance.random() < 0.1:
            held = frozenset(p for p in scene.progress if chance.random() < 0.2)
            scene.paused = Paused(chance.random() < 0.3, held)
        if chance.random() < 0.01:
            self.assign(chance.choice([p for p in scene.progress if self.stuck is None or p != self.stuck[1]]))
        for partition in list(scene.progress):
            self.move(partition)
        return scene.look(1)

    def move(self, partition: Partition) -> None:
        scene = self.scene
        at, lag = scene.progress[partition], scene.lags[partition]
        paused = scene.paused.everything or partition in scene.paused.partitions
        newest, oldest, finished = at.newest, at.oldest, at.oldest_finished
        if not paused and lag != 0 and self.due(What.INTAKE, partition, STALLED_S):
            newest = (newest or 0) + 1
            oldest = newest if oldest is None else oldest
            lag = max(0, (lag or 3) - 1)
        elif lag is not None and self.chance.random() < 0.1:
            lag += self.chance.randrange(3)
        if at.oldest is not None and at.oldest_finished and self.due(What.SETTLING, partition, STALLED_S):
            oldest, finished = (at.oldest + 1 if at.oldest < (newest or 0) else None), False
        elif at.oldest is not None and not at.oldest_finished and scene.engine_up:
            finished = self.due(What.SCORING, partition, STALLED_S + DEADLINE_S)
        scene.progress[partition], scene.lags[partition] = Progress(at.epoch, newest, oldest, finished), lag

    def due(self, what: What, partition: Partition, limit_s: float) -> bool:
        """Whether something that is owed moves now; what is healthy does so in time."""
        if (what, partition) == self.stuck:
            return False
        waited_s = self.owed.get((what, partition), 0.0) + 1
        if waited_s < limit_s - 2 and self.chance.random() < 0.8:
            self.owed[what, partition] = waited_s
            return False
        self.owed.pop((what, partition), None)
        return True


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_slow_but_moves_is_never_named(seed: int) -> None:
    world = World(seed)
    for _ in range(2_000):
        assert world.second() == [], world.scene.dog.standstills


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("what", [What.INTAKE, What.SCORING, What.SETTLING])
def test_whatever_stops_moving_is_named_alone_and_no_longer_than_it_lasts(what: What, seed: int) -> None:
    world = World(seed)
    for _ in range(world.chance.randrange(200)):
        world.second()
    partition = world.chance.choice(list(world.scene.progress))
    world.stuck = (what, partition)
    for _ in range(1_500):
        found = world.second()
        if found:
            break
    assert found == [(what, partition)]
    world.stuck = None
    for _ in range(1_000):
        if not world.second():
            return
    raise AssertionError("it moves and is still named")
