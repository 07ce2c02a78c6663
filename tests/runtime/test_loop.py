"""Worker: every ticket reaches one end, whatever happens to the stream, the engine or the worker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import orjson
import pytest

from tests.core.sets import rule_set
from tests.runtime.desks import RULES, broker, ends, make_worker, send
from tests.runtime.engines import ScriptedEngine
from tests.waiting import until
from worker.adapters.memory import MemoryStream
from worker.core.envelope import (
    ATTEMPT,
    DEAD_LETTER_DETAIL,
    DEAD_LETTER_REASON,
    DECISION_HEADER,
    ORIGIN_OFFSET,
    POINTER,
    envelope_json_schema,
)
from worker.core.scores import ScoreRequest
from worker.errors import ConfigError, EngineUnavailable, InvalidTicket, StreamFatal
from worker.ports import Delivery, Output, Partition, Paused
from worker.runtime.asking import Patience
from worker.runtime.loop import BRIEFLY_S, SLOWLY, Limits, Worker
from worker.runtime.outputs import Outputs, Provenance
from worker.runtime.service import running
from worker.runtime.stream_thread import Demand
from worker.telemetry import DEAD_LETTERS, DECISIONS, Metrics


async def test_tickets_end_in_their_topic_with_the_decision_in_a_header_and_on_its_own_topic() -> None:
    on = broker()
    on.produce(
        RULES.input_topic,
        b"\xff\x00key",
        orjson.dumps({"id": "7", "text": "label 1"}),
        (("a", b"\xc3\x28"), ("a", None), ("empty", b""), (DECISION_HEADER, b"forged")),
    )
    worker = make_worker(on, ScriptedEngine())
    async with running(worker):
        await until(lambda: worker.status().settled == 1)
    (record,) = on.records("desk.login")
    assert (record.key, orjson.loads(record.value or b"")) == (b"\xff\x00key", {"id": "7", "text": "label 1"})
    assert record.headers[:-1] == (("a", b"\xc3\x28"), ("a", None), ("empty", b""))
    name, body = record.headers[-1]
    assert name == DECISION_HEADER
    (decision,) = on.records("desk.decisions")
    assert decision.value == body
    envelope = orjson.loads(body or b"")
    assert envelope["ticket_id"] == "7"
    assert (envelope["action"], envelope["category"], envelope["topic"]) == ("route", "login", "desk.login")
    assert set(envelope) == set(envelope_json_schema()["properties"])


async def test_a_bug_in_making_a_dead_letter_is_one_decision_and_no_dead_letter_that_there_is_not() -> None:
    class Failing(Outputs):
        def dead_letter(self, delivery: Delivery, error: InvalidTicket) -> tuple[Output, ...]:
            raise ZeroDivisionError

    on = broker(partitions=1)
    on.produce(RULES.input_topic, b"k", b"[]")
    metrics = Metrics()
    worker = make_worker(on, ScriptedEngine(), metrics=metrics)
    worker._outputs = Failing(RULES, Provenance(None, None, None))
    async with running(worker):
        await until(lambda: worker.status().settled == 1)
    assert len(on.records("desk.human")) == 1
    counted = {metric: sum(sample.value for sample in metrics.samples(metric)) for metric in (DECISIONS, DEAD_LETTERS)}
    assert counted == {DECISIONS: 1, DEAD_LETTERS: 0}


async def test_bytes_that_are_no_ticket_are_dead_lettered_once_and_the_partition_moves_on() -> None:
    on = broker(partitions=1)
    bad = [None, b"", b"\xff", b"[]", b'{"text": ""}', b'{"text":' + b"[" * 100_000]
    for value in bad:
        on.produce(RULES.input_topic, b"k", value, (("h", b"1"), (ATTEMPT, b"2")))
    ids = send(on, 3)
    worker = make_worker(on, ScriptedEngine())
    async with running(worker):
        await until(lambda: worker.status().settled == len(bad) + 3)
    dead = on.records("desk.dead-letter")
    assert [record.value for record in dead] == bad
    for offset, record in enumerate(dead):
        headers = dict(record.headers)
        assert headers["h"] == b"1"
        assert headers[ATTEMPT] == b"3"
        assert headers[ORIGIN_OFFSET] == str(offset).encode()
        assert headers[DEAD_LETTER_REASON]
    assert all(len(ends(on)[i]) == 1 for i in ids)


async def test_one_slow_ticket_holds_back_its_own_commit_and_nobody_elses_scoring() -> None:
    on = broker(partitions=2)
    reached, gate = asyncio.Event(), asyncio.Event()

    class Slow(ScriptedEngine):
        async def score(self, requests: Sequence[ScoreRequest]):  # type: ignore[no-untyped-def]
            if any("slow" in r.item for r in requests):
                reached.set()
                await gate.wait()
            return await super().score(requests)

    on.produce(RULES.input_topic, None, orjson.dumps({"id": "slow", "text": "slow label 0"}), partition=0)
    worker = make_worker(on, Slow())
    async with running(worker):
        await until(reached.is_set)  # from now on the others are in batches of their own
        for n in range(50):
            on.produce(RULES.input_topic, None, orjson.dumps({"id": f"f{n}", "text": f"label 1 {n}"}), partition=n % 2)
        await until(lambda: worker.status().settled == 25)
        await asyncio.sleep(0.05)
        assert on.committed("ticket-router").get(Partition(RULES.input_topic, 0), 0) == 0
        assert on.committed("ticket-router")[Partition(RULES.input_topic, 1)] == 25
        gate.set()
        await until(lambda: worker.status().settled == 51)
    assert all(len(topics) == 1 for topics in ends(on).values())


async def test_intake_stops_at_the_limit_of_tickets_and_of_bytes_and_goes_on() -> None:
    for limits in (
        Limits(max_in_flight=10, settle_interval_s=0.01, drain_s=5),
        Limits(max_in_flight_bytes=2_000, max_ticket_bytes=200, settle_interval_s=0.01, drain_s=5),
    ):
        on = broker(partitions=4)
        send(on, 300)
        worker = make_worker(on, ScriptedEngine(delay_s=0.002), limits=limits)
        most = [0, 0]
        async with running(worker) as task:
            while worker.status().settled < 300 and not task.done():
                status = worker.status()
                most = [max(most[0], status.in_flight), max(most[1], status.in_flight_bytes)]
                await asyncio.sleep(0.001)
        assert 0 < most[0] <= limits.max_in_flight
        assert most[1] <= limits.max_in_flight_bytes
        assert len(ends(on)) == 300


async def test_a_refused_category_topic_sends_the_ticket_to_people_and_the_rest_goes_on() -> None:
    on = broker(partitions=1)
    on.refuse("desk.login", "TOPIC_AUTHORIZATION_FAILED")
    send(on, 9)
    worker = make_worker(on, ScriptedEngine())
    async with running(worker):
        await until(lambda: worker.status().settled == 9)
    found = ends(on)
    assert {i for i, topics in found.items() if "desk.human" in topics} == {"t1", "t4", "t7"}
    human = on.records("desk.human")[0]
    envelope = orjson.loads(dict(human.headers)[DECISION_HEADER] or b"")
    assert envelope["reasons"][0]["code"] == "topic_refused"


async def test_what_no_topic_takes_whole_becomes_a_pointer_to_its_origin() -> None:
    on = broker(partitions=1, max_message_bytes=3_000)
    on.produce(RULES.input_topic, b"k", orjson.dumps({"id": "big", "text": "label 1 " + "x" * 2_800}))
    ids = send(on, 3)
    worker = make_worker(on, ScriptedEngine())
    async with running(worker):
        await until(lambda: worker.status().settled == 4)
    (dead,) = on.records("desk.dead-letter")
    headers = dict(dead.headers)
    assert dead.value is None
    assert headers[POINTER] == b"value"
    assert headers[ORIGIN_OFFSET] == b"0"
    assert all(len(ends(on)[i]) == 1 for i in ids)


async def test_a_pointer_keeps_the_reason_of_the_dead_letter_whose_place_it_takes() -> None:
    """Whoever asks for one reason finds all of them."""
    on = broker(partitions=1, max_message_bytes=3_000)
    on.produce(RULES.input_topic, b"k", b"no ticket" * 330)
    on.produce(RULES.input_topic, b"k", orjson.dumps({"id": "big", "text": "label 1 " + "x" * 2_800}))
    worker = make_worker(on, ScriptedEngine())
    async with running(worker):
        await until(lambda: worker.status().settled == 2)
    told = {headers[ORIGIN_OFFSET]: headers for headers in (dict(r.headers) for r in on.records("desk.dead-letter"))}
    assert {offset: headers[DEAD_LETTER_REASON] for offset, headers in told.items()} == {
        b"0": b"invalid_json",
        b"1": b"undeliverable",
    }
    assert all(POINTER in headers for headers in told.values())
    assert (told[b"0"][DEAD_LETTER_DETAIL] or b"").startswith(b"MSG_SIZE_TOO_LARGE; ")


async def test_where_not_even_a_pointer_is_taken_the_worker_ends_and_commits_nothing() -> None:
    on = broker(partitions=1)
    for topic in RULES.output_topics:
        on.refuse(topic, "TOPIC_AUTHORIZATION_FAILED")
    send(on, 3)
    worker = make_worker(on, ScriptedEngine())
    with pytest.raises(StreamFatal, match="desk.dead-letter"):
        async with running(worker) as task:
            await asyncio.wait([task], timeout=20)
    assert on.committed("ticket-router").get(Partition(RULES.input_topic, 0), 0) == 0


async def test_a_missing_input_topic_is_an_error_at_the_start() -> None:
    on = broker()
    worker = make_worker(on, ScriptedEngine(), stream=MemoryStream(on, "tickets.misspelt"))
    with pytest.raises(ConfigError, match="misspelt"):
        await worker.run()


async def test_a_broker_that_goes_away_and_comes_back_loses_nothing() -> None:
    on = broker()
    ids = send(on, 60)
    worker = make_worker(on, ScriptedEngine(delay_s=0.005))
    async with running(worker):
        await until(lambda: worker.status().settled > 5)
        on.set_down(True)
        await until(lambda: worker.status().broker_trouble is not None)
        assert not worker.status().ready
        on.set_down(False)
        ids += send(on, 60, first=60)
        await until(lambda: worker.status().settled == 120)
    assert all(ends(on)[i] for i in ids)


async def test_an_engine_that_is_down_holds_the_tickets_back_and_readiness_says_so() -> None:
    down = [True]

    def script(_: Sequence[ScoreRequest]) -> None:
        if down[0]:
            raise EngineUnavailable("refused")

    on = broker()
    send(on, 40)
    worker = make_worker(on, ScriptedEngine(script))
    async with running(worker):
        await until(lambda: not worker.status().engine_up)
        await asyncio.sleep(0.05)
        assert worker.status().settled == 0
        assert not worker.status().ready
        down[0] = False
        await until(lambda: worker.status().settled == 40)
        assert worker.status().ready
    assert not on.records("desk.human")


async def test_a_drain_that_meets_a_hanging_engine_ends_in_time_and_commits_nothing_open() -> None:
    on = broker(partitions=1)
    send(on, 5)
    limits = Limits(settle_interval_s=0.01, drain_s=0.2, revoke_s=0.2)
    worker = make_worker(on, ScriptedEngine(delay_s=60), limits=limits)
    started = asyncio.get_running_loop().time()
    async with running(worker):
        await until(lambda: worker.status().in_flight == 5)
    assert asyncio.get_running_loop().time() - started < 20
    assert on.committed("ticket-router").get(Partition(RULES.input_topic, 0), 0) == 0


async def test_a_bug_in_scoring_costs_the_ticket_its_automation_and_nothing_else() -> None:
    def bug(requests: Sequence[ScoreRequest]) -> None:
        if any(" 4" in r.item for r in requests):
            raise ZeroDivisionError

    on = broker(partitions=1)
    send(on, 6)
    worker = make_worker(on, ScriptedEngine(bug))
    async with running(worker):
        await until(lambda: worker.status().settled == 6)
    assert "desk.human" in ends(on)["t4"]


async def test_overrides_route_while_the_engine_is_down() -> None:
    field = {"kind": "field", "name": "alerts", "pointer": "/channel", "equals": "alerts"}
    rules = rule_set(overrides=[{**field, "then": "route", "category": "bug"}])

    def script(_: Sequence[ScoreRequest]) -> None:
        raise EngineUnavailable("refused")

    on = broker(rules=rules)
    on.produce(rules.input_topic, None, orjson.dumps({"id": "a", "text": "disk full", "channel": "alerts"}))
    worker = make_worker(on, ScriptedEngine(script), rules=rules)
    async with running(worker):
        await until(lambda: worker.status().settled == 1)
    assert ends(on, rules) == {"a": ["desk.bug"]}


@pytest.mark.parametrize("seed", range(6))
async def test_seeded_crashes_drains_and_rebalances_lose_nothing_and_keep_each_keys_order(seed: int) -> None:
    """Workers come, drain and die at random while tickets arrive; in the end every id is in an output."""
    chance = random.Random(seed)
    on = broker(partitions=4)
    engine = ScriptedEngine(lambda _: _fail_sometimes(chance))
    limits = Limits(max_in_flight=20, settle_interval_s=0.005, drain_s=5.0, revoke_s=0.1)
    alive: list[tuple[Worker, MemoryStream, asyncio.Task[None]]] = []

    def start() -> None:
        stream = MemoryStream(on, RULES.input_topic)
        patience = Patience(first_backoff_s=0.002)
        worker = make_worker(on, engine, limits=limits, stream=stream, patience=patience)
        alive.append((worker, stream, asyncio.create_task(worker.run())))

    start()
    ids: list[str] = []
    for _ in range(20):
        ids += send(on, chance.randrange(1, 20), first=len(ids))
        action = chance.choice(["start", "drain", "crash", "expel", "commit", "nothing"])
        if action == "start" and len(alive) < 3:
            start()
        elif action == "drain" and len(alive) > 1:
            worker, _, task = alive.pop(chance.randrange(len(alive)))
            worker.stop()
            await task
        elif action == "crash" and len(alive) > 1:
            worker, stream, task = alive.pop(chance.randrange(len(alive)))
            _crash(stream)
            await asyncio.wait([task], timeout=10)
            assert isinstance(task.exception(), StreamFatal)
            on.expel(stream)  # only now: a session ends after its process
        elif action == "expel":
            on.expel(chance.choice(alive)[1])
        elif action == "commit":
            on.fail_commits(2)
        await asyncio.sleep(chance.random() * 0.05)
    await until(lambda: all(i in ends(on) for i in ids), timeout_s=30)
    for worker, _, task in alive:
        worker.stop()
        await task
    assert sorted(ends(on)) == sorted(ids)
    assert all(len(set(topics)) == 1 for topics in ends(on).values())  # one topic, whatever the copies
    for topic in ("desk.billing", "desk.login", "desk.bug"):
        _assert_order(on.records(topic))


def _fail_sometimes(chance: random.Random) -> None:
    if chance.random() < 0.1:
        raise EngineUnavailable("chance")


def _crash(stream: MemoryStream) -> None:
    """From now on the process is dead to the broker: nothing is settled, nothing committed."""

    def dead(*_: object, **__: object) -> None:
        raise StreamFatal("killed")

    stream.settle = stream.poll = dead  # type: ignore[method-assign, assignment]


def _assert_order(records: Sequence[object]) -> None:
    """First copies of a key's tickets come in the order in which they were sent."""
    seen: dict[bytes, list[int]] = {}
    for record in records:
        number = int(orjson.loads(record.value)["id"][1:])  # type: ignore[attr-defined]
        line = seen.setdefault(record.key, [])  # type: ignore[attr-defined]
        if number not in line:
            line.append(number)
    assert all(line == sorted(line) for line in seen.values())


def _admitted(worker: Worker, count: int, *, first: int = 0) -> list[Delivery]:
    partition = Partition(RULES.input_topic, 0)
    if not worker.status().assigned:
        worker.assigned({partition: 1})
    body = b'{"text": "label 1"}'
    deliveries = [Delivery(partition, first + n, 1, None, body, (), -1) for n in range(count)]
    worker.admit(deliveries)
    return deliveries


async def test_a_full_worker_takes_nothing_at_first_and_pauses_only_where_it_stays_full() -> None:
    now = 100.0
    worker = make_worker(broker(1), ScriptedEngine(delay_s=60), limits=Limits(max_in_flight=4))
    worker._clock = lambda: now
    _admitted(worker, 4)
    asked = worker.demand()
    assert (asked.max_records, asked.paused.everything) == (0, False)
    now += BRIEFLY_S
    asked = worker.demand()
    assert asked.max_records > 0, "a paused stream is polled, since it must serve the group"
    assert asked.paused.everything
    worker.forget([Partition(RULES.input_topic, 0)])
    assert worker.demand() == Demand(4, Paused())


async def test_what_is_finished_is_settled_early_where_it_takes_up_half_of_the_room() -> None:
    worker = make_worker(broker(1), ScriptedEngine(), limits=Limits(max_in_flight=4))
    first, second = _admitted(worker, 2)
    assert not worker.demand().settle
    worker._tracker.complete(first, ())
    assert not worker.demand().settle
    worker._tracker.complete(second, ())
    assert worker.demand().settle
    worker.forget([Partition(RULES.input_topic, 0)])


async def test_a_slow_engine_is_given_no_more_than_it_gets_through_in_time() -> None:
    limits = Limits(max_in_flight=1_000, max_in_flight_bytes=2**40, ticket_deadline_s=60.0)
    worker = make_worker(broker(1), ScriptedEngine(delay_s=60), limits=limits)
    _admitted(worker, SLOWLY)
    assert worker.demand().max_records == 0, "nothing is known of the engine yet"
    worker._per_second = 10.0
    assert worker.demand().max_records == 0
    worker._per_second = 30.0  # 450 in a quarter of the deadline
    worker.forget([Partition(RULES.input_topic, 0)])
    worker.demand()
    _admitted(worker, SLOWLY)
    assert worker.demand().max_records == 450 - SLOWLY
    worker.forget([Partition(RULES.input_topic, 0)])


async def test_a_stuck_partition_leaves_half_of_what_a_slow_engine_is_given_to_the_others() -> None:
    limits = Limits(max_in_flight=1_000, max_in_flight_bytes=2**40)
    worker = make_worker(broker(2), ScriptedEngine(delay_s=60), limits=limits)
    stuck, other = Partition(RULES.input_topic, 0), Partition(RULES.input_topic, 1)
    _admitted(worker, SLOWLY // 2 - 1)
    worker.assigned({other: 1})
    assert not worker.demand().paused.partitions
    _admitted(worker, 1, first=SLOWLY // 2 - 1)
    assert worker.demand().paused.partitions == {stuck}
    worker.forget([stuck, other])


async def test_a_ticket_that_a_rule_decides_needs_no_task() -> None:
    rules = rule_set(
        overrides=[{"kind": "field", "name": "vip", "pointer": "/tenant", "equals": "a", "then": "escalate"}]
    )
    worker = make_worker(broker(1, rules=rules), ScriptedEngine(), rules=rules)
    partition = Partition(rules.input_topic, 0)
    worker.assigned({partition: 1})
    bodies = [b'{"text": "label 1", "tenant": "a"}', b"no ticket", b'{"text": "label 1"}']
    worker.admit([Delivery(partition, n, 1, None, body, (), -1) for n, body in enumerate(bodies)])
    ended = worker.ready().partitions[0].finished
    assert [item.outputs[0].topic for item in ended] == [rules.human_topic, rules.dead_letter_topic]
    await until(lambda: worker._tracker.open_deliveries() == 0)
    worker.forget([partition])
