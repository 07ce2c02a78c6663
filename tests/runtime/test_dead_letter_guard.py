"""DeadLetterGuard: a worker that takes most messages for garbage ends before it has thrown them out."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import orjson
import pytest

from tests.runtime.desks import RULES, broker, ends, make_worker, send
from tests.runtime.engines import ScriptedEngine
from tests.waiting import until
from worker.adapters.memory import MemoryBroker
from worker.core.envelope import ATTEMPT
from worker.errors import TooManyDeadLetters
from worker.ports import Delivery, Finished, Headers, Output, Partition, PartitionSettlement, Settlement
from worker.runtime.dead_letter_guard import HOLD_S, LEAST, WINDOW, DeadLetterGuard
from worker.runtime.loop import Limits
from worker.runtime.service import running

LIMITS = Limits(settle_interval_s=0.01, drain_s=5.0, revoke_s=0.2, dead_letter_limit=0.5)
AT = Partition("tickets", 0)


def delivery(offset: int, headers: Headers = ()) -> Delivery:
    return Delivery(AT, offset, 1, None, b"", headers, -1)


def judged(shares: Sequence[bool], limit: float = 0.5, headers: Headers = ()) -> str | None:
    """The verdict after these messages; True is a dead letter."""
    guard = DeadLetterGuard(limit)
    for offset, dead in enumerate(shares):
        guard.judged(delivery(offset, headers), "no_text" if dead else None, 0.0)
    return guard.verdict


class TestVerdict:
    def test_needs_a_minimum(self) -> None:
        assert judged([True] * (LEAST - 1)) is None
        verdict = judged([True] * LEAST) or ""
        assert f"{LEAST} of the last {LEAST} messages" in verdict
        assert "no_text" in verdict
        assert f"tickets/0/{LEAST - 1}" in verdict
        assert "ROUTER_DEAD_LETTER_LIMIT" in verdict

    def test_is_about_the_last_messages_only(self) -> None:
        assert judged([False] * 10_000 + [True] * (WINDOW // 2)) is None
        assert judged([False] * 10_000 + [True] * (WINDOW // 2 + 1)) is not None
        assert judged([False, True] * 5_000) is None, "a half is not more than a half"

    @pytest.mark.parametrize("seed", range(5))
    def test_a_topic_with_much_garbage_below_the_limit_is_served(self, seed: int) -> None:
        chance = random.Random(seed)
        assert judged([chance.random() < 0.3 for _ in range(20_000)]) is None
        assert judged([chance.random() < 0.7 for _ in range(20_000)]) is not None

    @pytest.mark.parametrize("limit", [0.0, 1.0])
    def test_can_be_turned_off(self, limit: float) -> None:
        assert judged([True] * 1_000, limit) is None

    def test_leaves_out_what_was_sent_in_again(self) -> None:
        assert judged([True] * 1_000, headers=((ATTEMPT, b"1"),)) is None

    def test_a_ticket_that_no_topic_took_counts_once_and_as_a_dead_letter(self) -> None:
        guard = DeadLetterGuard(0.5)
        for offset in range(LEAST):
            guard.judged(delivery(offset), None, 0.0)
        for offset in range(LEAST // 2):
            guard.judged(delivery(offset), "undeliverable", 0.0)
        assert guard.verdict is None
        guard.judged(delivery(LEAST - 1), "undeliverable", 0.0)
        assert "undeliverable" in (guard.verdict or "")


class TestHolding:
    @staticmethod
    def finished(offset: int, dead: bool, headers: Headers = ()) -> Finished:
        topic = "dead" if dead else "routed"
        return Finished(delivery(offset, headers), (Output(topic, None, b""), Output("decisions", None, b"")))

    def offered(self, *dead: bool, headers: Headers = ()) -> Settlement:
        finished = tuple(self.finished(offset, each, headers) for offset, each in enumerate(dead))
        return Settlement((PartitionSettlement(AT, 1, finished, len(finished)),))

    def test_dead_letters_wait_until_enough_was_judged_or_a_while_has_passed(self) -> None:
        offered = self.offered(False, False, True, False)
        guard = DeadLetterGuard(0.5)
        guard.judged(delivery(0), None, 10.0)
        (part,) = guard.without_held(offered, "dead", 10.0).partitions
        assert ([f.delivery.offset for f in part.finished], part.next_offset) == ([0, 1], 2)
        assert not guard.without_held(self.offered(True, False), "dead", 10.0)
        assert guard.without_held(offered, "dead", 10.0 + HOLD_S) == offered
        for offset in range(LEAST):
            guard.judged(delivery(offset), None, 10.0)
        assert guard.without_held(offered, "dead", 10.0) == offered

    def test_nothing_is_held_back_where_the_guard_is_off_or_for_what_was_sent_in_again(self) -> None:
        for limit, headers in ((0.0, ()), (0.5, ((ATTEMPT, b"1"),))):
            guard = DeadLetterGuard(limit)
            guard.judged(delivery(0), None, 0.0)
            offered = self.offered(True, True, headers=headers)
            assert guard.without_held(offered, "dead", 0.0) == offered

    def test_nothing_is_settled_after_the_verdict(self) -> None:
        guard = DeadLetterGuard(0.5)
        for offset in range(LEAST):
            guard.judged(delivery(offset), "no_text", 0.0)
        assert not guard.without_held(self.offered(False, False), "dead", 1e6)


class TestWorker:
    async def test_a_worker_whose_rules_fit_no_message_ends_and_leaves_no_dead_letter_however_often_it_starts(
        self,
    ) -> None:
        on = broker()
        garbage(on, 1_000)
        for _ in range(3):
            with pytest.raises(TooManyDeadLetters, match="no_text"):
                await asyncio.wait_for(make_worker(on, ScriptedEngine(), limits=LIMITS).run(), 20)
        assert not on.records("desk.dead-letter")
        assert not on.committed("ticket-router")

    async def test_a_worker_that_had_done_well_stops_at_the_limit(self) -> None:
        on = broker(partitions=1)
        ids = send(on, 300)
        worker = make_worker(on, ScriptedEngine(), limits=LIMITS)
        with pytest.raises(TooManyDeadLetters):
            async with running(worker) as task:
                await until(lambda: worker.status().settled == 300)
                garbage(on, 1_000)
                await asyncio.wait([task], timeout=20)
        assert task.done()
        assert all(ends(on)[i] for i in ids)
        assert len(on.records("desk.dead-letter")) <= WINDOW // 2
        assert on.committed("ticket-router")[Partition(RULES.input_topic, 0)] <= 300 + WINDOW // 2

    async def test_slow_scoring_does_not_make_the_first_dead_letters_look_like_most(self) -> None:
        """30 of 100 are garbage, and those are finished at once."""
        on = broker(partitions=4)
        for n in range(300):
            if n % 10 < 3:
                garbage(on, 1)
            else:
                send(on, 1, first=n)
        worker = make_worker(on, ScriptedEngine(delay_s=0.05), limits=LIMITS)
        async with running(worker):
            await until(lambda: worker.status().settled == 300)
        assert len(on.records("desk.dead-letter")) == 90

    async def test_tickets_that_not_even_people_get_end_the_worker_too(self) -> None:
        on = broker(partitions=4)
        for topic in RULES.output_topics:
            if topic != RULES.dead_letter_topic:
                on.refuse(topic, "TOPIC_AUTHORIZATION_FAILED")
        send(on, 2_000)
        worker = make_worker(on, ScriptedEngine(), limits=LIMITS)
        with pytest.raises(TooManyDeadLetters, match="undeliverable"):
            await asyncio.wait_for(worker.run(), 60)
        assert len(on.records("desk.dead-letter")) < 2_000 / 2

    async def test_a_few_dead_letters_of_a_quiet_topic_are_held_back_for_a_moment_only(self) -> None:
        on = broker(partitions=1)
        garbage(on, 2)
        ids = send(on, 2)
        worker = make_worker(on, ScriptedEngine(), limits=LIMITS)
        async with running(worker):
            await until(lambda: worker.status().settled == 4)
        assert all(ends(on)[i] for i in ids)


def garbage(on: MemoryBroker, count: int) -> None:
    for n in range(count):
        on.produce(RULES.input_topic, b"%d" % n, orjson.dumps({"id": "x", "elsewhere": "the text"}))
