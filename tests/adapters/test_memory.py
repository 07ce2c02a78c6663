"""What the broker and the cache in memory promise beyond the contracts of stream and cache."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.adapters.memory import ENTRY_BYTES, LABEL_BYTES, MemoryBroker, MemoryCache, MemoryStream
from worker.core.scores import LabelScores
from worker.errors import ConfigError, StreamRetriable
from worker.ports import Delivery, Finished, Output, Partition, PartitionSettlement, Settled, Settlement

SCORES = LabelScores.from_logprobs((-0.5, -1.5))


class Listener:
    def __init__(self) -> None:
        self.events: list[str] = []

    def assigned(self, *_: object) -> None:
        self.events.append("assigned")

    def revoking(self, *_: object) -> Settlement:
        self.events.append("revoking")
        return Settlement()

    def released(self, *_: object) -> None:
        self.events.append("released")

    def lost(self, *_: object) -> None:
        self.events.append("lost")

    def gap(self, gap: object) -> None: ...


def opened(broker: MemoryBroker, topic: str = "in") -> MemoryStream:
    stream = MemoryStream(broker, topic)
    stream.open(Listener())
    return stream


def routed(deliveries: list[Delivery], topic: str = "out") -> Settlement:
    finished = tuple(Finished(d, (Output(topic, d.key, d.value),)) for d in deliveries)
    first = deliveries[0]
    return Settlement((PartitionSettlement(first.partition, first.epoch, finished, deliveries[-1].offset + 1),))


class TestMemoryBroker:
    def test_equal_keys_share_a_partition_and_no_key_takes_turns(self) -> None:
        broker = MemoryBroker({"t": 4})
        assert len({broker.produce("t", b"same", b"v").partition for _ in range(20)}) == 1
        broker = MemoryBroker({"t": 4})
        assert [broker.produce("t", None, b"v").partition.number for _ in range(8)] == [0, 1, 2, 3] * 2

    def test_records_carry_the_time_of_the_clock(self) -> None:
        broker = MemoryBroker({"t": 1}, clock=lambda: 1_700_000_000.5)
        assert broker.produce("t", None, b"v").timestamp_ms == 1_700_000_000_500

    @given(st.lists(st.sampled_from(["join", "leave", "poll", "expel"]), max_size=30), st.integers(1, 6))
    def test_every_partition_has_one_owner_in_the_end_whatever_happened(self, steps: list[str], count: int) -> None:
        broker = MemoryBroker({"in": count})
        members = [opened(broker)]
        for step in steps:
            if step == "join":
                members.append(opened(broker))
            elif step == "leave" and len(members) > 1:
                members.pop(0).close()
            elif step == "expel":
                broker.expel(members[-1])
            for member in members[::2]:
                member.poll(1, 0)
        for _ in range(4):
            for member in members:
                member.poll(1, 0)
        owned = [partition for member in members for partition in member.assignment()]
        assert sorted(owned) == [Partition("in", number) for number in range(count)]
        sizes = [len(member.assignment()) for member in members]
        assert max(sizes) - min(sizes) <= 1

    def test_who_joins_takes_from_everybody_and_nothing_else_moves(self) -> None:
        broker = MemoryBroker({"in": 6})
        first, second = opened(broker), opened(broker)
        for member in (first, second, first, second):
            member.poll(1, 0)
        owned_before = [set(first.assignment()), set(second.assignment())]
        third = opened(broker)
        for member in (first, second, third):
            member.poll(1, 0)
        assert [len(m.assignment()) for m in (first, second, third)] == [2, 2, 2]
        assert set(first.assignment()) < owned_before[0]
        assert set(second.assignment()) < owned_before[1]

    def test_a_failed_commit_leaves_its_outputs_behind(self) -> None:
        broker = MemoryBroker({"in": 1, "out": 1})
        broker.produce("in", None, b"v")
        stream = opened(broker)
        deliveries = list(stream.poll(10, 1))
        broker.fail_commits(1)
        with pytest.raises(StreamRetriable):
            stream.settle(routed(deliveries))
        assert broker.committed("ticket-router") == {}
        assert stream.settle(routed(deliveries)) == Settled({Partition("in", 0): 1})
        assert [record.value for record in broker.records("out")] == [b"v", b"v"]

    def test_a_refusal_lasts_until_it_is_taken_back(self) -> None:
        broker = MemoryBroker({"in": 1, "out": 1})
        broker.produce("in", None, b"v")
        stream = opened(broker)
        deliveries = list(stream.poll(10, 1))
        broker.refuse("out", "TOPIC_AUTHORIZATION_FAILED")
        assert [r.code for r in stream.settle(routed(deliveries)).refused] == ["TOPIC_AUTHORIZATION_FAILED"]
        broker.refuse("out", None)
        assert stream.settle(routed(deliveries)).refused == ()

    def test_a_stream_does_not_open_while_the_broker_is_down(self) -> None:
        broker = MemoryBroker({"in": 1})
        broker.set_down(True)
        with pytest.raises(ConfigError, match="'in'"):
            opened(broker)


class TestMemoryCache:
    def test_what_it_holds_is_bounded_in_bytes_whatever_is_put_again(self) -> None:
        cache = MemoryCache(max_bytes=10_000)
        rows = [LabelScores.from_logprobs((-5.0 - n,) * 20) for n in range(100)]

        async def use() -> list[int]:
            for _ in range(2):
                for n, row in enumerate(rows):
                    await cache.put_many({f"{n}": row})
            return [n for n in range(100) if (await cache.get_many([f"{n}"]))[0] is not None]

        kept = asyncio.run(use())
        assert kept == list(range(100 - len(kept), 100))
        assert len(kept) == 10_000 // (ENTRY_BYTES + 20 * LABEL_BYTES)

    def test_an_entry_ends_with_its_time(self) -> None:
        now = [0.0]
        cache = MemoryCache(ttl_s=10.0, clock=lambda: now[0])
        asyncio.run(cache.put_many({"a": SCORES}))
        now[0] = 9.9
        assert asyncio.run(cache.get_many(["a"])) == [SCORES]
        now[0] = 10.0
        assert asyncio.run(cache.get_many(["a", "a"])) == [None, None]

    def test_the_longest_unused_entry_goes_first(self) -> None:
        cache = MemoryCache(max_entries=2)

        async def use() -> list[LabelScores | None]:
            await cache.put_many({"a": SCORES, "b": SCORES})
            await cache.get_many(["a"])
            await cache.put_many({"c": SCORES})
            return list(await cache.get_many(["a", "b", "c"]))

        assert asyncio.run(use()) == [SCORES, None, SCORES]
