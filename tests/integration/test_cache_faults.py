"""A worker over a real Redis that is away, silent, slow, full, read-only or full of lies: the routes stay the same."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import redis.asyncio as redis_asyncio

from tests.integration.loop_lag import LoopLag
from tests.runtime.desks import broker, ends, make_worker, send
from tests.runtime.engines import ScriptedEngine
from tests.servers.redis_server import free_port, redis_server
from tests.waiting import until
from worker.adapters.redis_cache import KEY_PREFIX, RedisCache
from worker.adapters.sealed_scores import FORMAT, HEADER
from worker.runtime.loop import Limits
from worker.runtime.service import running

COUNT = 240
TOPICS = ("desk.billing", "desk.login", "desk.bug")
LIMITS = Limits(max_in_flight=40, settle_interval_s=0.01, drain_s=10.0)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with redis_server() as address:
        yield address


@pytest.fixture
async def server(url: str) -> AsyncIterator[Any]:
    """A client of the emptied server, which is back to normal afterwards."""
    async with redis_asyncio.Redis.from_url(url) as client:
        await client.replicaof("NO", "ONE")
        await client.config_set("maxmemory", "0")
        await client.flushall()
        yield client
        await client.replicaof("NO", "ONE")
        await client.config_set("maxmemory", "0")


def cache_at(url: str, timeout_s: float = 0.05) -> RedisCache:
    return RedisCache(
        url, secret=b"for the tests only", owner=b"tests", ttl_s=60, timeout_s=timeout_s, clock=time.monotonic
    )


async def routes(cache: RedisCache, engine: ScriptedEngine | None = None) -> ScriptedEngine:
    """Sends the same tickets through a worker of its own; asserts that each ends once, where its text says."""
    on = broker()
    ids = send(on, COUNT)
    engine = engine or ScriptedEngine(delay_s=0.002)
    worker = make_worker(on, engine, cache=cache, limits=LIMITS)
    async with LoopLag() as lag, running(worker):
        await until(lambda: worker.status().settled == COUNT, timeout_s=60)
    assert dict(ends(on)) == {ticket: [TOPICS[n % 3]] for n, ticket in enumerate(ids)}
    assert lag.longest_s < 0.25
    await cache.aclose()
    return engine


async def test_a_port_that_nobody_listens_on() -> None:
    cache = cache_at(f"redis://127.0.0.1:{free_port()}/0")
    await routes(cache)
    assert cache.counters["errors"] >= 5
    assert cache.counters["skipped"] > 0, "after a few failures it is left alone"


async def test_a_listener_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        cache = cache_at(f"redis://127.0.0.1:{listener.getsockname()[1]}/0")
        await routes(cache)
        assert cache.counters["errors"] >= 5
        assert cache.counters["skipped"] > 0


async def test_a_server_that_is_paused_all_the_while() -> None:
    with redis_server() as address:
        async with redis_asyncio.Redis.from_url(address) as client:
            await client.client_pause(120_000, all=True)
            cache = cache_at(address)
            await routes(cache)
            assert cache.counters["hits"] == 0
            assert cache.counters["skipped"] > 0
            client.connection_pool.reset()


@pytest.mark.parametrize("delay_s", [0.02, 0.2])
async def test_a_server_that_is_slow(url: str, server: Any, delay_s: float) -> None:
    """Within the deadline its answers are used, beyond it they cost one deadline each until it is left alone."""
    async with _delayed(url, delay_s) as slow:
        cache = cache_at(slow, timeout_s=20.0 if delay_s < 0.1 else 0.05)
        await routes(cache)
        assert cache.counters["hits"] == 0
        again = cache_at(slow, timeout_s=20.0 if delay_s < 0.1 else 0.05)
        await routes(again)
        assert (again.counters["hits"] > 0) == (delay_s < 0.1)


async def test_a_server_that_is_full(url: str, server: Any) -> None:
    await server.config_set("maxmemory-policy", "noeviction")
    await server.config_set("maxmemory", "1mb")
    with contextlib.suppress(redis_asyncio.RedisError):
        for number in range(200):
            await server.set(f"somebody else's {number}", b"x" * 20_000)
    cache = cache_at(url, timeout_s=20.0)
    await routes(cache)
    assert cache.counters["errors"] >= 5
    assert cache.counters["misses"] == COUNT, "it still reads"


async def test_a_server_that_evicts_what_was_just_written(url: str, server: Any) -> None:
    await server.config_set("maxmemory-policy", "allkeys-lru")
    await server.config_set("maxmemory", "1mb")
    for _ in range(2):
        await routes(cache_at(url, timeout_s=20.0))
        await server.flushall()


async def test_a_read_only_replica(url: str, server: Any) -> None:
    await routes(cache_at(url, timeout_s=20.0))
    await server.replicaof("127.0.0.1", str(free_port()))
    cache = cache_at(url, timeout_s=20.0)
    engine = await routes(cache)
    assert cache.counters["hits"] == COUNT
    assert engine.calls == []


def _sealed(*numbers: float, form: int = FORMAT, count: int | None = None) -> Callable[[RedisCache, str], bytes]:
    """A value with a right signature: what a worker with the secret, but of another kind, could have written."""

    def value(cache: RedisCache, key: str) -> bytes:
        labels = len(numbers) - 1 if count is None else count
        payload = HEADER.pack(form, labels) + struct.pack(f"<{len(numbers)}d", *numbers)
        return payload + cache._seal.tag(key, payload)

    return value


LIES: dict[str, Callable[[RedisCache, str], bytes]] = {
    "garbage": lambda _, __: b"\x00garbage" * 9,
    "empty": lambda _, __: b"",
    "json": lambda _, __: b'{"logprobs": [-0.01, -5, -5], "mass": 1}',
    "another version": _sealed(-0.01, -5.0, -5.0, 1.0, form=77),
    "another number of labels": _sealed(-0.01, -5.0, 1.0),
    "a count that lies": _sealed(-0.01, -5.0, -5.0, 1.0, count=2),
    "not a number": _sealed(math.nan, -5.0, -5.0, 1.0),
    "infinite": _sealed(-math.inf, -5.0, -5.0, 1.0),
    "a probability above 1": _sealed(0.5, -5.0, -5.0, 1.0),
    "a mass above 1": _sealed(-0.01, -5.0, -5.0, 7.0),
}


@pytest.mark.parametrize("lie", LIES)
async def test_values_that_are_lies(url: str, server: Any, lie: str) -> None:
    """Every one of them would send its ticket to billing, if it were believed."""
    first = cache_at(url, timeout_s=20.0)
    await routes(first)
    await _written(server)
    for name in [key async for key in server.scan_iter()]:
        await server.set(name, LIES[lie](first, name.decode().removeprefix(KEY_PREFIX)))
    cache = cache_at(url, timeout_s=20.0)
    engine = await routes(cache)
    assert sum(map(len, engine.calls)) == COUNT, "everything is asked again"
    if lie != "another number of labels":  # that one is found out by whoever knows how many there should be
        assert cache.counters["rejected"] == COUNT


async def test_values_that_belong_to_other_tickets(url: str, server: Any) -> None:
    await routes(cache_at(url, timeout_s=20.0))
    await _written(server)
    names = sorted([key async for key in server.scan_iter()])
    values = [await server.get(name) for name in names]
    for name, value in zip(names, values[1:] + values[:1], strict=True):
        await server.set(name, value)
    cache = cache_at(url, timeout_s=20.0)
    await routes(cache)
    assert cache.counters["rejected"] == COUNT


async def _written(server: Any) -> None:
    async with asyncio.timeout(20):
        while await server.dbsize() < COUNT:
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def _delayed(url: str, delay_s: float) -> AsyncIterator[str]:
    """The server behind a line that holds every answer back."""
    port = int(url.rsplit(":", 1)[1].split("/")[0])

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wait_s: float) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                await asyncio.sleep(wait_s)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(reader, back, 0.0), carry(there, writer, delay_s))

    line = await asyncio.start_server(connection, "127.0.0.1", 0)
    async with line:
        yield f"redis://127.0.0.1:{line.sockets[0].getsockname()[1]}/0"
