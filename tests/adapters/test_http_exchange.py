"""HttpExchange: what a server is sent, and what an exchange leaves behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from worker.adapters.http_exchange import Answer, HttpExchange, Server
from worker.errors import EngineUnavailable

SERVER = Server("the server", "", "")
OK = b"HTTP/1.1 200 OK\r\nSet-Cookie: replica=7; Path=/\r\nRetry-After: 3\r\nContent-Length: 2\r\n\r\n{}"
BUSY = OK.replace(b"200 OK", b"503 Busy")


@asynccontextmanager
async def exchanging(*answers: bytes) -> AsyncIterator[tuple[HttpExchange, list[tuple[str, dict[str, str], bytes]]]]:
    """An exchange with a server that gives these answers in turn, the last for ever; and the request lines, headers and
    bodies that came."""
    came: list[tuple[str, dict[str, str], bytes]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines)}
                came.append((line, headers, await reader.readexactly(int(headers.get("content-length", "0")))))
                writer.write(answers[min(len(came), len(answers)) - 1])
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/engine/"
    http = HttpExchange(url, SERVER, api_key="sesame", connections=1, connect_timeout_s=30.0)
    try:
        yield http, came
    finally:
        await http.aclose()
        server.close()


async def test_a_request_carries_the_key_and_its_length_and_never_a_cookie() -> None:
    async with exchanging(OK) as (http, came):
        assert await http.ask("POST", "/v1/score", b'{"a":1}', 100, 60.0) == Answer(200, None, b"{}")
        await http.ask("GET", "/ready", None, 100, 60.0)
    (posted, headers, body), (got, later, _) = came
    assert (posted, got, body) == ("POST /engine/v1/score HTTP/1.1", "GET /engine/ready HTTP/1.1", b'{"a":1}')
    for each in headers, later:
        assert each["authorization"] == "Bearer sesame"
        assert (each["accept-encoding"], each["content-type"]) == ("identity", "application/json")
        assert "cookie" not in each
        assert "transfer-encoding" not in each


async def test_when_to_come_again_is_read_from_a_refusal() -> None:
    async with exchanging(BUSY) as (http, _):
        failure = http.failure(await http.ask("GET", "/ready", None, 100, 60.0))
    assert isinstance(failure, EngineUnavailable)
    assert failure.retry_after_s == 3.0


async def test_an_exchange_leaves_nothing_to_the_collector_of_cycles() -> None:
    """A body is then freed at once, and the collector, which looks at every ticket under way, has less to do."""
    async with exchanging(OK) as (http, _):
        await http.ask("POST", "/v1/score", b"{}", 100, 60.0)  # opens the connection
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                await http.ask("POST", "/v1/score", b"{}", 100, 60.0)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = {type(each).__module__.partition(".")[0] for each in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not left & {"httpx", "httpx_aiohttp", "aiohttp", "worker"}


async def test_a_closed_exchange_says_so() -> None:
    async with exchanging(OK) as (http, came):
        await http.aclose()
        with pytest.raises(EngineUnavailable, match="closed"):
            await http.ask("GET", "/ready", None, 100, 60.0)
    assert came == []
