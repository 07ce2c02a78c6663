"""Several workers and one Redis: who scores, who waits, and what an operator can count and remove."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import redis.asyncio as redis_asyncio

from tests.servers.redis_server import free_port, redis_server
from tests.waiting import until
from worker.adapters import redis_upkeep
from worker.adapters.memory import MemoryCache
from worker.adapters.redis_cache import KEY_PREFIX, LEASE, MOST_KEYS, SCRIPTS_AGAIN_S, RedisCache
from worker.adapters.tiered_cache import TieredCache
from worker.core.scores import LabelScores
from worker.errors import ConfigError
from worker.ports import Lease
from worker.runtime.cache_batch import CacheBatch, Waits

SCORES = LabelScores.from_logprobs((-0.2, -2.5, -4.0))
KEYS = [f"desk:{number:040x}" for number in range(40)]
LEASE_S = 60.0
"""Longer than any test."""


def _worker(url: str, owner: bytes, **more: Any) -> RedisCache:
    given = {"timeout_s": 20.0, "clock": lambda: 0.0, **more}  # a loaded machine must not turn hits into misses
    return RedisCache(url, secret=b"the deployment's secret", owner=owner, ttl_s=60, **given)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with redis_server() as address:
        yield address


@pytest.fixture
async def server(url: str) -> AsyncIterator[Any]:
    async with redis_asyncio.Redis.from_url(url) as client:
        await client.flushall()
        yield client
        await client.config_set("maxmemory", "0")
        await client.replicaof("NO", "ONE")
        await client.acl_deluser("limited")


@pytest.fixture
async def one(url: str, server: Any) -> AsyncIterator[RedisCache]:
    cache = _worker(url, b"one")
    yield cache
    await cache.aclose()


@pytest.fixture
async def two(url: str, server: Any) -> AsyncIterator[RedisCache]:
    cache = _worker(url, b"two")
    yield cache
    await cache.aclose()


class TestLeases:
    async def test_the_first_who_asks_gets_the_lease_and_keeps_it(self, one: RedisCache, two: RedisCache) -> None:
        assert list(await one.get_or_lease(KEYS, LEASE_S)) == [Lease.OURS] * len(KEYS)
        assert list(await two.get_or_lease(KEYS, LEASE_S)) == [Lease.THEIRS] * len(KEYS)
        assert list(await one.get_or_lease(KEYS, LEASE_S)) == [Lease.OURS] * len(KEYS)

    async def test_scores_end_the_lease(self, one: RedisCache, two: RedisCache) -> None:
        await one.get_or_lease(KEYS[:2], LEASE_S)
        await one.put_many({KEYS[0]: SCORES})
        assert list(await two.get_or_lease(KEYS[:3], LEASE_S)) == [SCORES, Lease.THEIRS, Lease.OURS]

    async def test_release_ends_ones_own_leases_only(self, one: RedisCache, two: RedisCache) -> None:
        await one.get_or_lease(KEYS[:1], LEASE_S)
        await two.put_many({}, released=KEYS[:1])
        assert list(await two.get_or_lease(KEYS[:1], LEASE_S)) == [Lease.THEIRS]
        await one.put_many({}, released=KEYS[:1])
        assert list(await two.get_or_lease(KEYS[:1], LEASE_S)) == [Lease.OURS]

    async def test_release_never_takes_scores_away(self, one: RedisCache) -> None:
        await one.get_or_lease(KEYS[:1], LEASE_S)
        await one.put_many({KEYS[0]: SCORES})
        await one.put_many({}, released=KEYS[:1])
        assert list(await one.get_many(KEYS[:1])) == [SCORES]

    async def test_whatever_lies_in_place_of_a_lease_the_others_are_let_go_and_scores_are_put(
        self, one: RedisCache, two: RedisCache, server: Any
    ) -> None:
        await one.get_or_lease(KEYS, LEASE_S)
        await server.delete(KEY_PREFIX + KEYS[1])
        await server.rpush(KEY_PREFIX + KEYS[1], b"no string")
        await one.put_many({KEYS[0]: SCORES}, released=KEYS[1:])
        assert one.counters["errors"] == 0
        assert list(await two.get_or_lease([KEYS[0], *KEYS[2:]], LEASE_S)) == [SCORES, *[Lease.OURS] * len(KEYS[2:])]

    async def test_a_lease_ends_by_itself(self, one: RedisCache, two: RedisCache, server: Any) -> None:
        await one.get_or_lease(KEYS[:1], LEASE_S)
        assert 0 < await server.pttl(KEY_PREFIX + KEYS[0]) <= LEASE_S * 1_000
        await one.get_or_lease(KEYS[1:2], 0.001)
        await asyncio.sleep(0.05)
        assert list(await two.get_or_lease(KEYS[1:2], LEASE_S)) == [Lease.OURS]

    async def test_to_a_plain_look_up_a_lease_is_a_miss_and_no_forgery(self, one: RedisCache, two: RedisCache) -> None:
        await one.get_or_lease(KEYS[:1], LEASE_S)
        assert list(await two.get_many(KEYS[:1])) == [None]
        assert (two.counters["misses"], two.counters["rejected"]) == (1, 0)

    async def test_a_batch_is_one_round_trip(self, one: RedisCache, server: Any) -> None:
        await one.get_or_lease(KEYS, LEASE_S)  # loads the script
        before = (await server.info("commandstats"))["cmdstat_evalsha"]["calls"]
        await one.get_or_lease([f"other {key}" for key in KEYS], LEASE_S)
        assert (await server.info("commandstats"))["cmdstat_evalsha"]["calls"] == before + 1

    async def test_scores_and_releases_are_one_round_trip(self, one: RedisCache, two: RedisCache, server: Any) -> None:
        await one.get_or_lease(KEYS[:3], LEASE_S)
        await one.put_many({}, released=KEYS[3:4])  # loads the script
        before = (await server.info("commandstats"))["cmdstat_evalsha"]["calls"]
        await one.put_many({KEYS[0]: SCORES}, released=KEYS[1:2])
        assert (await server.info("commandstats"))["cmdstat_evalsha"]["calls"] == before + 1
        assert list(await two.get_or_lease(KEYS[:3], LEASE_S)) == [SCORES, Lease.OURS, Lease.THEIRS]

    async def test_hits_and_misses_count_once_and_waiting_counts_as_neither(
        self, one: RedisCache, two: RedisCache
    ) -> None:
        await one.put_many({KEYS[0]: SCORES})
        await two.get_or_lease(KEYS[1:2], LEASE_S)
        await one.get_or_lease(KEYS[:3], LEASE_S)
        assert (one.counters["hits"], one.counters["misses"]) == (1, 1)

    async def test_more_keys_than_a_script_takes(self, one: RedisCache, two: RedisCache) -> None:
        keys = [f"desk:{n}" for n in range(2 * MOST_KEYS + 7)]
        assert set(await one.get_or_lease(keys, LEASE_S)) == {Lease.OURS}
        await one.put_many({}, released=keys)
        assert set(await two.get_or_lease(keys, LEASE_S)) == {Lease.OURS}
        await one.put_many(dict.fromkeys(keys, SCORES))
        assert set(await one.get_or_lease(keys, LEASE_S)) == {SCORES}

    async def test_a_foreign_value_is_a_miss_without_a_lease(self, one: RedisCache, server: Any) -> None:
        await server.set(KEY_PREFIX + KEYS[0], b"garbage")
        await server.rpush(KEY_PREFIX + KEYS[1], "a")
        assert list(await one.get_or_lease(KEYS[:2], LEASE_S)) == [None, None]
        assert one.counters["rejected"] == 1


class TestFailsOpen:
    async def test_without_a_server_every_key_is_a_miss(self) -> None:
        cache = _worker(f"redis://127.0.0.1:{free_port()}/0", b"one")
        assert list(await cache.get_or_lease(KEYS, LEASE_S)) == [None] * len(KEYS)
        await cache.put_many({}, released=KEYS)
        assert (cache.counters["misses"], cache.counters["errors"]) == (len(KEYS), 2)
        await cache.aclose()

    async def test_a_full_server_still_answers_and_leases_nothing(self, one: RedisCache, server: Any) -> None:
        await one.put_many({KEYS[0]: SCORES})
        await server.config_set("maxmemory-policy", "noeviction")
        await server.config_set("maxmemory", "1")
        assert list(await one.get_or_lease(KEYS[:2], LEASE_S)) == [SCORES, None]
        assert one.counters["errors"] == 0

    async def test_a_full_server_lets_go_of_leases_and_takes_no_scores(
        self, one: RedisCache, two: RedisCache, server: Any
    ) -> None:
        await one.get_or_lease(KEYS[:3], LEASE_S)
        await server.config_set("maxmemory-policy", "noeviction")
        await server.config_set("maxmemory", "1")
        await one.put_many({KEYS[0]: SCORES, KEYS[1]: SCORES}, released=KEYS[2:3])
        assert one.counters["errors"] == 1
        await server.config_set("maxmemory", "0")
        assert list(await two.get_or_lease(KEYS[:3], LEASE_S)) == [Lease.THEIRS, Lease.THEIRS, Lease.OURS]

    async def test_a_read_only_replica_still_answers_and_leases_nothing(self, one: RedisCache, server: Any) -> None:
        await one.put_many({KEYS[0]: SCORES})
        await server.replicaof("127.0.0.1", str(free_port()))
        assert list(await one.get_or_lease(KEYS[:2], LEASE_S)) == [SCORES, None]
        assert one.counters["errors"] == 0

    async def test_a_user_who_may_not_run_scripts_reads_and_writes_without_leases(self, url: str, server: Any) -> None:
        rules = ["+mget", "+set", "+get"]
        await server.acl_setuser("limited", enabled=True, passwords=["+p"], keys=["*"], commands=rules)
        cache = _worker(url.replace("redis://", "redis://limited:p@"), b"one")
        await cache.put_many({KEYS[0]: SCORES})
        assert list(await cache.get_or_lease(KEYS[:2], LEASE_S)) == [SCORES, None]
        assert cache.counters["errors"] == 0
        await cache.aclose()

    async def test_scripts_that_were_refused_are_tried_again_after_a_while_and_not_with_each_batch(
        self, url: str, server: Any
    ) -> None:
        async def refusals() -> int:
            stats = await server.info("commandstats")
            return int(stats.get("cmdstat_evalsha", {}).get("rejected_calls", 0))

        rules = ["+mget", "+set", "+get", "+del"]
        await server.acl_setuser("limited", enabled=True, passwords=["+p"], keys=["*"], commands=rules)
        await server.config_resetstat()
        at = 0.0
        cache = _worker(url.replace("redis://", "redis://limited:p@"), b"one", clock=lambda: at)
        for _ in range(5):
            assert list(await cache.get_or_lease(KEYS[:1], LEASE_S)) == [None]
        assert await refusals() == 1
        at += SCRIPTS_AGAIN_S
        await asyncio.gather(*(cache.get_or_lease(KEYS[:1], LEASE_S) for _ in range(5)))
        assert await refusals() == 2, "one of them found out for all"
        await server.acl_setuser("limited", enabled=True, keys=["*"], commands=[*rules, "+evalsha", "+script|load"])
        at += SCRIPTS_AGAIN_S - 1.0
        assert list(await cache.get_or_lease(KEYS[:1], LEASE_S)) == [None]
        at += 1.0
        assert list(await cache.get_or_lease(KEYS[:1], LEASE_S)) == [Lease.OURS]
        assert list(await cache.get_or_lease(KEYS[1:2], LEASE_S)) == [Lease.OURS], "and so it stays"
        await cache.put_many({}, released=KEYS[:2])
        assert await server.exists(*(KEY_PREFIX + key for key in KEYS[:2])) == 0
        assert cache.counters["errors"] == 0
        await cache.aclose()

    async def test_scripts_that_the_server_forgot_are_loaded_again(self, one: RedisCache, server: Any) -> None:
        await one.get_or_lease(KEYS[:1], LEASE_S)
        await server.script_flush()
        assert list(await one.get_or_lease(KEYS[:2], LEASE_S)) == [Lease.OURS] * 2
        assert one.counters["errors"] == 0

    async def test_a_cluster_is_named_by_the_probe(self) -> None:
        with redis_server("--cluster-enabled", "yes", "--cluster-port", str(free_port())) as address:
            async with redis_asyncio.Redis.from_url(address) as client:
                await client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
                async with asyncio.timeout(20):
                    while b"cluster_state:ok" not in await client.execute_command("CLUSTER", "INFO"):
                        await asyncio.sleep(0.05)
            cache = _worker(address, b"one")
            assert "Cluster" in (await cache.probe() or "")
            assert list(await cache.get_or_lease(KEYS[:2], LEASE_S)) == [None, None]
            await cache.aclose()


class TestTiers:
    async def test_what_was_found_once_is_not_asked_for_again(self, one: RedisCache, two: RedisCache) -> None:
        await one.put_many({KEYS[0]: SCORES})
        tiers = TieredCache(MemoryCache(), two)
        for look in (tiers.get_many, lambda keys: tiers.get_or_lease(keys, LEASE_S)):
            assert list(await look(KEYS[:1])) == [SCORES]  # type: ignore[operator]
        assert (two.counters["hits"], two.counters["misses"]) == (1, 0)

    async def test_what_was_put_is_there_for_this_worker_and_for_others(self, one: RedisCache, two: RedisCache) -> None:
        near = MemoryCache()
        await TieredCache(near, one).put_many({KEYS[0]: SCORES})
        assert list(await near.get_many(KEYS[:1])) == list(await two.get_many(KEYS[:1])) == [SCORES]

    async def test_a_miss_is_remembered_by_nobody(self, one: RedisCache, two: RedisCache) -> None:
        tiers = TieredCache(MemoryCache(), one)
        assert list(await tiers.get_or_lease(KEYS[:1], LEASE_S)) == [Lease.OURS]
        await two.put_many({KEYS[0]: SCORES})
        assert list(await tiers.get_or_lease(KEYS[:1], LEASE_S)) == [SCORES]


class TestBatches:
    """The runtime's own part over the real server: three workers, one of which dies."""

    @pytest.fixture
    async def batches(self, url: str, server: Any) -> AsyncIterator[Sequence[CacheBatch]]:
        caches = [TieredCache(MemoryCache(), _worker(url, owner)) for owner in (b"a", b"b", b"c")]
        waits = Waits(lease_s=LEASE_S, longest_s=LEASE_S, poll_s=0.01)
        made = [CacheBatch(cache, waits=waits) for cache in caches]
        yield made
        for batch, cache in zip(made, caches, strict=True):
            await batch.aclose()
            await cache.aclose()

    async def test_one_scores_and_the_others_get_it(self, batches: Sequence[CacheBatch]) -> None:
        first, *others = batches
        assert await first.get(KEYS[0]) is None
        waiting = [asyncio.ensure_future(batch.get(KEYS[0])) for batch in others for _ in range(10)]
        await until(lambda: all(batch.counters["waits"] == 1 for batch in others))
        first.put(KEYS[0], SCORES)
        assert set(await asyncio.gather(*waiting)) == {SCORES}
        assert [batch.counters["answered"] for batch in others] == [1, 1]

    async def test_a_worker_that_died_costs_its_lease_and_one_other_takes_over(
        self, batches: Sequence[CacheBatch], server: Any
    ) -> None:
        dead, *others = batches
        await dead.get(KEYS[0])
        waiting = {asyncio.ensure_future(batch.get(KEYS[0])): batch for batch in others}
        await until(lambda: all(batch.counters["waits"] == 1 for batch in others))
        await server.pexpire(KEY_PREFIX + KEYS[0], 50)  # what is left of the dead worker's lease
        done, still = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=20)
        (taker,) = done
        assert taker.result() is None
        waiting[taker].put(KEYS[0], SCORES)
        assert [await task for task in still] == [SCORES]
        assert sum(batch.counters["takeovers"] for batch in others) == 1

    async def test_who_gives_up_lets_another_try_at_once(self, url: str, server: Any) -> None:
        caches = [_worker(url, owner) for owner in (b"a", b"b")]
        waits = Waits(lease_s=LEASE_S, longest_s=LEASE_S, poll_s=0.01)
        first, second = (CacheBatch(cache, waits=waits) for cache in caches)
        await first.get(KEYS[0])
        waiting = asyncio.ensure_future(second.get(KEYS[0]))
        await until(lambda: second.counters["waits"] == 1)
        first.release(KEYS[0])
        async with asyncio.timeout(20):
            assert await waiting is None
        assert second.counters == {"waits": 1, "answered": 0, "takeovers": 1, "in_vain": 0}
        for batch, cache in zip((first, second), caches, strict=True):
            await batch.aclose()
            await cache.aclose()


class TestUpkeep:
    @pytest.fixture
    async def filled(self, one: RedisCache, server: Any) -> None:
        await one.put_many({f"desk:{n:040x}": SCORES for n in range(30)})
        await one.put_many({f"desk_2:{n:040x}": SCORES for n in range(7)})
        await server.set("somebody else's", "x")

    async def test_it_counts_each_rule_set(self, filled: None, url: str) -> None:
        found = await asyncio.to_thread(redis_upkeep.survey, url, None, 100_000)
        assert found.complete
        assert {name: held.entries for name, held in found.holdings.items()} == {"desk": 30, "desk_2": 7}
        desk = found.holdings["desk"]
        assert 30 * 50 < desk.bytes < 30 * 1_000
        assert desk.shortest_ttl_s is not None
        assert desk.longest_ttl_s is not None
        assert 0 < desk.shortest_ttl_s <= desk.longest_ttl_s <= 60

    async def test_one_rule_set_is_flushed_and_nothing_else(self, filled: None, url: str, server: Any) -> None:
        assert await asyncio.to_thread(redis_upkeep.flush, url, "desk", 100_000) == (30, True)
        left = await asyncio.to_thread(redis_upkeep.survey, url, None, 100_000)
        assert {name: held.entries for name, held in left.holdings.items()} == {"desk_2": 7}
        assert await asyncio.to_thread(redis_upkeep.flush, url, None, 100_000) == (7, True)
        assert await server.get("somebody else's") == b"x"

    async def test_it_stops_where_it_was_told_to(self, server: Any, url: str) -> None:
        await server.mset({f"{KEY_PREFIX}desk:{n}": LEASE for n in range(5_000)})
        found = await asyncio.to_thread(redis_upkeep.survey, url, None, 2_000)
        assert not found.complete
        assert 0 < found.holdings["desk"].entries < 5_000

    def test_a_server_that_is_away_is_one_line_without_its_password(self) -> None:
        with pytest.raises(ConfigError, match="ROUTER_REDIS_URL") as caught:
            redis_upkeep.survey(f"redis://:hunter2@127.0.0.1:{free_port()}/0", None, 1_000)
        assert "hunter2" not in str(caught.value)
