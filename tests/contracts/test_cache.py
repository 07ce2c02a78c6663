"""What every score cache promises, and what the one on a server does when the server misbehaves."""

from __future__ import annotations

import asyncio
import math
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import redis.asyncio as redis_asyncio
from hypothesis import given
from hypothesis import strategies as st

from tests.servers.redis_server import free_port, redis_server
from worker.adapters.memory import MemoryCache
from worker.adapters.redis_cache import KEY_PREFIX, RedisCache
from worker.adapters.sealed_scores import FORMAT, HEADER, PARTIAL_FORMAT, TAG_BYTES, Seal
from worker.adapters.tiered_cache import TieredCache
from worker.core.scores import LabelScores
from worker.errors import ConfigError
from worker.ports import ScoreCache

SECRET = b"the deployment's secret"
SCORES = LabelScores.from_logprobs((-0.2, -2.5, -4.0))
OTHERS = LabelScores.from_logprobs((-3.0, -0.1, -5.0))
KEYS = [f"{number:040x}" for number in range(40)]
DEADLINE_S = 0.3
SLACK_S = 2.0
"""How much longer than its deadline a call may take on a loaded machine; far below a client's default of seconds."""


def _cache(url: str, *, secret: bytes = SECRET, clock: Callable[[], float] = time.monotonic, **more: Any) -> RedisCache:
    given = {"timeout_s": DEADLINE_S, "owner": b"this worker", **more}
    return RedisCache(url, secret=secret, ttl_s=60, clock=clock, **given)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with redis_server() as address:
        yield address


@pytest.fixture
async def server(url: str) -> AsyncIterator[Any]:
    """A client of the emptied server, and the server back to normal afterwards."""
    async with redis_asyncio.Redis.from_url(url) as client:
        await client.flushall()
        yield client
        await client.replicaof("NO", "ONE")
        await client.config_set("maxmemory", "0")


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as closing:
        yield closing


@pytest.fixture
async def redis_cache(url: str, server: Any, stack: AsyncExitStack) -> RedisCache:
    cache = _cache(url, timeout_s=20.0)  # a loaded machine must not turn hits into misses
    stack.push_async_callback(cache.aclose)
    return cache


@pytest.fixture(params=["memory", "redis", "tiers"])
async def cache(request: pytest.FixtureRequest, redis_cache: RedisCache) -> AsyncIterator[ScoreCache]:
    if request.param == "redis":
        yield redis_cache
    elif request.param == "tiers":
        yield TieredCache(MemoryCache(max_entries=10), redis_cache)
    else:
        memory = MemoryCache()
        yield memory
        await memory.aclose()


class TestEveryCache:
    async def test_what_was_put_is_got_bit_by_bit(self, cache: ScoreCache) -> None:
        items = {key: LabelScores.from_logprobs((-math.pi, -1 / 3, -float(n + 7))) for n, key in enumerate(KEYS)}
        await cache.put_many(items)
        assert list(await cache.get_many(KEYS)) == list(items.values())

    async def test_answers_come_in_the_order_of_the_keys_with_misses_between(self, cache: ScoreCache) -> None:
        await cache.put_many({KEYS[0]: SCORES, KEYS[2]: OTHERS})
        asked = [KEYS[2], KEYS[1], KEYS[0], KEYS[2]]
        assert list(await cache.get_many(asked)) == [OTHERS, None, SCORES, OTHERS]

    async def test_a_later_put_wins(self, cache: ScoreCache) -> None:
        await cache.put_many({KEYS[0]: SCORES})
        await cache.put_many({KEYS[0]: OTHERS})
        assert list(await cache.get_many([KEYS[0]])) == [OTHERS]

    async def test_nothing_asked_is_nothing_answered(self, cache: ScoreCache) -> None:
        await cache.put_many({})
        assert list(await cache.get_many([])) == []

    async def test_a_label_mass_that_is_only_a_bound_is_kept(self, cache: ScoreCache) -> None:
        bounded = LabelScores(SCORES.logprobs, 0.5)
        await cache.put_many({KEYS[0]: bounded})
        assert list(await cache.get_many([KEYS[0]])) == [bounded]

    async def test_labels_that_were_not_returned_stay_unknown(self, cache: ScoreCache) -> None:
        partial = LabelScores.from_logprobs((-0.5, -3.0, -1.5, -3.0), unknown=(1, 3))
        await cache.put_many({KEYS[0]: partial, KEYS[1]: SCORES})
        assert list(await cache.get_many(KEYS[:2])) == [partial, SCORES]

    async def test_a_working_cache_probes_as_working(self, cache: ScoreCache) -> None:
        assert await cache.probe() is None

    async def test_concurrent_callers_get_their_own_answers(self, cache: ScoreCache) -> None:
        async def turn(number: int) -> bool:
            scores = LabelScores.from_logprobs((-1.0, -2.0 - number))
            await cache.put_many({KEYS[number]: scores})
            return list(await cache.get_many([KEYS[number]])) == [scores]

        assert all(await asyncio.gather(*map(turn, range(len(KEYS)))))


class TestWhatIsStored:
    async def test_values_expire(self, redis_cache: RedisCache, server: Any) -> None:
        await redis_cache.put_many({KEYS[0]: SCORES})
        assert 0 < await server.ttl(KEY_PREFIX + KEYS[0]) <= 60

    async def test_a_batch_is_one_round_trip_each_way(self, redis_cache: RedisCache, server: Any) -> None:
        await redis_cache.probe()
        before = (await server.info("commandstats")).get("cmdstat_mget", {"calls": 0})["calls"]
        await redis_cache.put_many(dict.fromkeys(KEYS, SCORES))
        await redis_cache.get_many(KEYS)
        assert (await server.info("commandstats"))["cmdstat_mget"]["calls"] == before + 1
        assert redis_cache.counters == {"hits": len(KEYS), "misses": 0, "rejected": 0, "errors": 0, "skipped": 0}

    async def test_a_value_is_small_and_holds_nothing_but_numbers(self, redis_cache: RedisCache, server: Any) -> None:
        await redis_cache.put_many({KEYS[0]: SCORES})
        value = await server.get(KEY_PREFIX + KEYS[0])
        assert len(value) == HEADER.size + 8 * 4 + TAG_BYTES

    @pytest.mark.parametrize(
        ("scores", "value"),
        [
            (
                SCORES,
                "0103009a9999999999c9bf00000000000004c000000000000010c0c509ea3b8669ed3f"
                "ef2a3383dc29d51a3014e8df6fe23218",
            ),
            (
                LabelScores.from_logprobs((-0.5, -3.0, -1.5, -3.0), unknown=(1, 3)),
                "020400000000000000e0bf00000000000008c0000000000000f8bf00000000000008c0116d02d9948cea3f01000300"
                "d8f10ca23297d685733c0f8e4a81e7ed",
            ),
        ],
    )
    async def test_workers_of_another_version_read_and_write_the_same_bytes(
        self, redis_cache: RedisCache, server: Any, scores: LabelScores, value: str
    ) -> None:
        key = f"desk:{0:040x}"
        await redis_cache.put_many({key: scores})
        assert (await server.get(KEY_PREFIX + key)).hex() == value
        assert list(await redis_cache.get_many([key])) == [scores]


def _sealed(cache: RedisCache, key: str, payload: bytes) -> bytes:
    """A value with a right tag, as only the secret can make it."""
    return payload + cache._seal.tag(key, payload)


def _payload(*numbers: float, form: int = FORMAT, count: int | None = None) -> bytes:
    labels = len(numbers) - 1 if count is None else count
    return HEADER.pack(form, labels) + struct.pack(f"<{len(numbers)}d", *numbers)


class TestNothingForeignIsBelieved:
    """Whoever can write to the server must not be able to steer a ticket."""

    async def _assert_rejected(self, cache: RedisCache, server: Any, value: bytes) -> None:
        await server.set(KEY_PREFIX + KEYS[0], value)
        before = cache.counters["rejected"]
        assert list(await cache.get_many([KEYS[0]])) == [None]
        assert cache.counters["rejected"] == before + 1

    async def test_the_right_value_is_believed(self, redis_cache: RedisCache, server: Any) -> None:
        await server.set(KEY_PREFIX + KEYS[0], _sealed(redis_cache, KEYS[0], _payload(-0.5, -1.5, 0.8)))
        assert list(await redis_cache.get_many([KEYS[0]])) == [LabelScores((-0.5, -1.5), 0.8)]

    @pytest.mark.parametrize("value", [b"", b"x", b"garbage" * 30, b"\x00" * 91, b'{"logprobs":[-0.1],"mass":1}'])
    async def test_garbage(self, redis_cache: RedisCache, server: Any, value: bytes) -> None:
        await self._assert_rejected(redis_cache, server, value)

    async def test_a_value_cut_anywhere(self, redis_cache: RedisCache, server: Any) -> None:
        whole = _sealed(redis_cache, KEYS[0], _payload(-0.5, -1.5, 0.8))
        for length in range(len(whole)):
            await self._assert_rejected(redis_cache, server, whole[:length])
        await self._assert_rejected(redis_cache, server, whole + b"\x00")

    async def test_any_flipped_bit(self, redis_cache: RedisCache, server: Any) -> None:
        whole = _sealed(redis_cache, KEYS[0], _payload(-0.5, -1.5, 0.8))
        for position in range(len(whole)):
            flipped = bytearray(whole)
            flipped[position] ^= 1
            await self._assert_rejected(redis_cache, server, bytes(flipped))

    async def test_the_value_of_another_key(self, redis_cache: RedisCache, server: Any) -> None:
        await redis_cache.put_many({KEYS[1]: OTHERS})
        await self._assert_rejected(redis_cache, server, await server.get(KEY_PREFIX + KEYS[1]))

    async def test_a_value_under_another_secret(self, redis_cache: RedisCache, server: Any, url: str) -> None:
        stranger = _cache(url, secret=b"somebody else's", timeout_s=20.0)
        await self._assert_rejected(redis_cache, server, _sealed(stranger, KEYS[0], _payload(-0.5, -1.5, 0.8)))
        await stranger.aclose()

    @pytest.mark.parametrize(
        "payload",
        [
            b"",
            b"\x01",
            _payload(-0.5, -1.5, 0.8, form=FORMAT + 1),
            _payload(-0.5, -1.5, 0.8, count=1),
            _payload(-0.5, -1.5, 0.8, count=3),
            _payload(0.8, count=0),
            _payload(math.nan, -1.5, 0.8),
            _payload(-math.inf, -1.5, 0.8),
            _payload(0.5, -1.5, 0.8),
            _payload(-0.5, -1.5, math.nan),
            _payload(-0.5, -1.5, -0.1),
            _payload(-0.5, -1.5, 0.8) + b"\x01\x00",
            _payload(-0.5, -1.5, 0.8, form=PARTIAL_FORMAT) + b"\x01",
            _payload(-0.5, -1.5, 0.8, form=PARTIAL_FORMAT) + b"\x02\x00",
            _payload(-0.5, -1.5, 0.8, form=PARTIAL_FORMAT) + b"\x01\x00\x00\x00",
            _payload(-0.5, -1.5, 1.5),
        ],
    )
    async def test_wrong_content_even_with_a_right_tag(
        self, redis_cache: RedisCache, server: Any, payload: bytes
    ) -> None:
        await self._assert_rejected(redis_cache, server, _sealed(redis_cache, KEYS[0], payload))

    async def test_a_key_of_another_type_is_a_miss(self, redis_cache: RedisCache, server: Any) -> None:
        await server.rpush(KEY_PREFIX + KEYS[0], "a", "b")
        assert list(await redis_cache.get_many([KEYS[0]])) == [None]

    @given(value=st.binary(max_size=200))
    def test_no_bytes_raise(self, value: bytes) -> None:
        assert Seal(SECRET).open(KEYS[0], value) is None


async def _assert_fails_open(cache: RedisCache, *, reads_too: bool = True) -> None:
    """Get and put end near the deadline, without an exception, as misses."""
    for call in (cache.get_many(KEYS), cache.put_many({KEYS[0]: SCORES})):
        start = time.monotonic()
        answer = await call
        assert time.monotonic() - start < DEADLINE_S + SLACK_S
        if reads_too and answer is not None:
            assert list(answer) == [None] * len(KEYS)


async def _pause(server: Any, duration_s: float) -> None:
    """The server takes commands and runs none of them; not even one that would end the pause."""
    await server.client_pause(round(duration_s * 1000), all=True)


class TestFaults:
    async def test_a_closed_port_is_a_miss(self, stack: AsyncExitStack) -> None:
        cache = _cache(f"redis://127.0.0.1:{free_port()}/0")
        stack.push_async_callback(cache.aclose)
        await _assert_fails_open(cache)
        assert cache.counters == {"hits": 0, "misses": len(KEYS), "rejected": 0, "errors": 2, "skipped": 0}
        assert "ConnectionError" in (await cache.probe() or "")

    async def test_a_silent_listener_costs_one_deadline(self, stack: AsyncExitStack) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            cache = _cache(f"redis://127.0.0.1:{listener.getsockname()[1]}/0")
            stack.push_async_callback(cache.aclose)
            await _assert_fails_open(cache)
            assert cache.counters["errors"] == 2
            assert "no answer within 300 ms" in (await cache.probe() or "")

    async def test_a_paused_server_costs_one_deadline_and_mixes_up_no_answers(
        self, url: str, server: Any, stack: AsyncExitStack
    ) -> None:
        patient = _cache(url, timeout_s=20.0)
        stack.push_async_callback(patient.aclose)
        await patient.put_many({KEYS[0]: SCORES, KEYS[1]: OTHERS})
        hasty = _cache(url)
        hasty._redis = patient._redis  # the same connections, which might keep a late answer for the next question
        await _pause(server, 2 * DEADLINE_S + SLACK_S)
        await _assert_fails_open(hasty)
        assert hasty.counters["errors"] == 2
        assert list(await patient.get_many([KEYS[1]])) == [OTHERS]
        assert list(await patient.get_many([KEYS[0]])) == [SCORES]

    async def test_a_full_server_still_reads(self, redis_cache: RedisCache, server: Any) -> None:
        await redis_cache.put_many({KEYS[0]: SCORES})
        await server.config_set("maxmemory-policy", "noeviction")
        await server.config_set("maxmemory", "1")
        for _ in range(10):
            await redis_cache.put_many({KEYS[1]: OTHERS})
        assert redis_cache.counters["errors"] == 5  # then the breaker skips
        assert redis_cache.counters["skipped"] == 5
        assert list(await redis_cache.get_many(KEYS[:2])) == [SCORES, None]

    async def test_a_read_only_replica_still_reads(self, redis_cache: RedisCache, server: Any) -> None:
        await redis_cache.put_many({KEYS[0]: SCORES})
        await server.replicaof("127.0.0.1", str(free_port()))
        for _ in range(10):
            await redis_cache.put_many({KEYS[1]: OTHERS})
        assert redis_cache.counters["errors"] == 5
        assert list(await redis_cache.get_many(KEYS[:2])) == [SCORES, None]

    async def test_connections_closed_by_the_server_are_replaced(self, redis_cache: RedisCache, server: Any) -> None:
        await redis_cache.put_many({KEYS[0]: SCORES})
        await server.client_kill_filter(_type="normal", skipme=True)
        await redis_cache.get_many([KEYS[0]])
        assert list(await redis_cache.get_many([KEYS[0]])) == [SCORES]

    async def test_a_cancelled_caller_stays_cancelled(self, stack: AsyncExitStack) -> None:
        loop = asyncio.get_running_loop()
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.setblocking(False)
        cache = _cache(f"redis://127.0.0.1:{listener.getsockname()[1]}/0", timeout_s=20.0)
        stack.push_async_callback(cache.aclose)
        task = asyncio.ensure_future(cache.get_many(KEYS))
        silent = stack.enter_context((await loop.sock_accept(listener))[0])
        assert await loop.sock_recv(silent, 1), "it asks, and waits for an answer"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


class TestBreaker:
    async def test_after_failures_in_a_row_it_skips_until_the_cool_down_has_passed(
        self, url: str, server: Any, stack: AsyncExitStack
    ) -> None:
        now = 100.0
        port = free_port()
        cache = _cache(f"redis://127.0.0.1:{port}/0", clock=lambda: now, failures_to_open=3, timeout_s=20.0)
        stack.push_async_callback(cache.aclose)
        for _ in range(10):
            assert list(await cache.get_many([KEYS[0]])) == [None]
        assert (cache.counters["errors"], cache.counters["skipped"]) == (3, 7)
        now += 4.9
        await cache.get_many([KEYS[0]])
        assert (cache.counters["errors"], cache.counters["skipped"]) == (3, 8)
        now += 0.2
        await asyncio.gather(*(cache.get_many([KEYS[0]]) for _ in range(5)))
        assert (cache.counters["errors"], cache.counters["skipped"]) == (4, 12), "one call tries, the others wait"
        with redis_server(port=port):
            now += 5.1
            await cache.get_many([KEYS[0]])
            await cache.put_many({KEYS[0]: SCORES})
            assert list(await cache.get_many([KEYS[0]])) == [SCORES]
            assert (cache.counters["errors"], cache.counters["skipped"]) == (4, 12)

    async def test_a_success_in_between_forgets_the_failures(
        self, url: str, server: Any, stack: AsyncExitStack
    ) -> None:
        cache = _cache(url, failures_to_open=2, timeout_s=20.0)
        stack.push_async_callback(cache.aclose)
        for full in ("1", "0", "1", "0"):
            await server.config_set("maxmemory", full)
            await cache.put_many({KEYS[0]: SCORES})
        assert (cache.counters["errors"], cache.counters["skipped"]) == (2, 0)


class TestPassword:
    async def test_the_password_of_the_url_is_used(self, stack: AsyncExitStack) -> None:
        with redis_server("--requirepass", "pa/ss@1") as address:
            cache = _cache(address.replace("redis://", "redis://:pa%2Fss%401@"), timeout_s=20.0)
            stack.push_async_callback(cache.aclose)
            await cache.put_many({KEYS[0]: SCORES})
            assert list(await cache.get_many([KEYS[0]])) == [SCORES]
            wrong = _cache(address.replace("redis://", "redis://:hunter2@"), timeout_s=20.0)
            stack.push_async_callback(wrong.aclose)
            assert list(await wrong.get_many([KEYS[0]])) == [None]
            said = await wrong.probe()
            assert said is not None
            assert "password" in said
            assert "hunter2" not in said

    @pytest.mark.parametrize("url", ["redis://:hunter2/x@host:6379/0", "http://:hunter2@host", "hunter2", ""])
    def test_a_broken_url_is_named_without_its_password(self, url: str) -> None:
        with pytest.raises(ConfigError, match="ROUTER_REDIS_URL") as caught:
            _cache(url)
        error: BaseException | None = caught.value
        assert "hunter2" not in str(error)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__

    def test_an_empty_secret_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="ROUTER_CACHE_SECRET"):
            _cache("redis://127.0.0.1:1/0", secret=b"")
