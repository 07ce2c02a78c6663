"""Listener: a public port does not let silent or numberless connections use up the process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import pytest
from aiohttp import web

from worker.errors import ConfigError
from worker.runtime.http import HealthServer
from worker.runtime.listener import NO_HTTP, NO_SUCH_EXPECTATION, Listener

HEAD = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def listening(*, most: int = 50, head_s: float = 60.0) -> AsyncIterator[int]:
    async def livez(_: web.Request) -> web.Response:
        return web.Response(text="alive\n")

    app = web.Application()
    app.router.add_get("/livez", livez)
    listener = Listener(app, max_connections=most, head_s=head_s, setting="THE_PORT")
    port = await listener.start("127.0.0.1", 0)
    try:
        yield port
    finally:
        await listener.aclose()


async def answer_to(port: int, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        return await asyncio.wait_for(reader.read(4_096), 20)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def is_connected(client: socket.socket) -> bool:
    try:
        client.getpeername()
    except OSError:
        return False
    return True


async def test_as_many_as_are_let_in_may_knock_while_the_loop_is_busy() -> None:
    async with listening(most=250) as port:
        with ExitStack() as stack:
            # Nothing is awaited in here, so nothing is accepted: the kernel alone answers.
            clients = [stack.enter_context(socket.socket()) for _ in range(250)]
            for client in clients:
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", port))
            assert sum(is_connected(client) for client in clients) == 250


@pytest.mark.parametrize("sent", [b"", HEAD[:20]])
async def test_a_connection_that_never_says_what_it_wants_is_ended(sent: bytes) -> None:
    async with listening(head_s=0.2) as port:
        assert await answer_to(port, sent) == b""


async def test_a_connection_that_asked_in_time_is_kept() -> None:
    async with listening(head_s=1.0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for wait_s in (1.5, 0.0):
            writer.write(HEAD)
            assert b"alive" in await asyncio.wait_for(reader.readuntil(b"alive"), 20)
            await asyncio.sleep(wait_s)
        writer.close()


async def test_connections_beyond_the_limit_are_ended_and_those_before_it_served() -> None:
    async with listening(most=3) as port:
        held = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD)
            assert b"200 OK" in await asyncio.wait_for(reader.read(4_096), 20)
            held.append((reader, writer))
        assert await answer_to(port, HEAD) == b""
        held[0][1].write(HEAD)
        assert b"200 OK" in await asyncio.wait_for(held[0][0].read(4_096), 20)
        for _, writer in held:
            writer.close()


SECRET = b"<script>hunter2</script>"


def said_of_itself(answered: bytes) -> list[bytes]:
    lines = answered.partition(b"\r\n\r\n")[0].split(b"\r\n")
    return [line[7:].strip() for line in lines if line.lower().startswith(b"server:")]


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\nX-A\x01: " + SECRET + b"\r\n\r\n", NO_HTTP),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: " + SECRET + b"\r\n\r\n", NO_HTTP),
        (b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: " + SECRET + b"\r\nContent-Length: 1\r\n\r\n", NO_HTTP),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + SECRET * 4_000 + b"\r\n\r\n", NO_HTTP),
        (SECRET + b" / HTTP/1.1\r\n\r\n", NO_HTTP),
        (b"GET / " + SECRET + b"\r\n\r\n", NO_HTTP),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nExpect: " + SECRET + b"\r\n\r\n", NO_SUCH_EXPECTATION),
    ],
)
async def test_what_no_handler_sees_is_answered_in_one_sentence_that_quotes_nothing(
    sent: bytes, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening() as port:
        answered = await answer_to(port, sent)
    assert answered.split(b" ", 2)[1] in (b"400", b"417")
    assert said_of_itself(answered) == [b"ticket-router"]
    assert answered.endswith(b"\r\n\r\n" + said.encode())
    assert b"hunter2" not in answered and "hunter2" not in caplog.text


async def test_what_a_handler_answers_does_not_say_what_serves_it_either() -> None:
    async with listening() as port:
        for path in (b"/livez", b"/nowhere"):
            answered = await answer_to(
                port, HEAD.replace(b"/livez", path).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
            )
            assert said_of_itself(answered) == [b"ticket-router"]


async def test_the_health_port_is_as_discreet() -> None:
    health = HealthServer(lambda: None, lambda: None, lambda: "")
    port = await health.start("127.0.0.1", 0)
    try:
        answered = await answer_to(port, b"GET / " + SECRET + b"\r\n\r\n")
    finally:
        await health.aclose()
    assert answered.startswith((b"HTTP/1.0 400 ", b"HTTP/1.1 400 "))
    assert said_of_itself(answered) == [b"ticket-router"]
    assert answered.endswith(NO_HTTP.encode())


async def test_a_port_that_is_taken_names_the_setting() -> None:
    async with listening() as port:
        listener = Listener(web.Application(), max_connections=1, head_s=1.0, setting="THE_PORT")
        with pytest.raises(ConfigError, match="THE_PORT"):
            await listener.start("127.0.0.1", port)
