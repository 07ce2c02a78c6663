"""Engines behind TLS: the named authority is believed and no other, and who is not says which setting is missing."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.servers.tls import Authority, authority
from worker.adapters.http_exchange import HttpExchange, Misconfigured, Server
from worker.errors import ConfigError, EngineError
from worker.settings import EngineName, Settings
from worker.wiring import make_engines, make_writer

SERVER = Server("the server", "", "")
REFUSAL = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("other"))


@asynccontextmanager
async def serving(tls: Authority) -> AsyncIterator[int]:
    """The port of a server over TLS that lets nobody in, once it has been asked."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(REFUSAL)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.certificate, tls.key)
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def asked(url: str, ca_file: Path | None) -> int:
    """The status of the answer."""
    http = HttpExchange(url, SERVER, api_key=None, connections=1, connect_timeout_s=20.0, ca_file=ca_file)
    try:
        return (await http.ask("GET", "/", None, 1_000, 60.0)).status
    finally:
        await http.aclose()


async def test_with_the_authority_of_the_server_it_is_asked(tls: Authority) -> None:
    async with serving(tls) as port:
        assert await asked(f"https://127.0.0.1:{port}", tls.authority) == 401


@pytest.mark.parametrize("which", ["none", "another"])
async def test_without_it_the_server_is_refused_and_the_setting_named(
    tls: Authority, other: Authority, which: str
) -> None:
    async with serving(tls) as port:
        with pytest.raises(Misconfigured, match="signed by no authority.*set ROUTER_ENGINE_CA_FILE") as told:
            await asked(f"https://127.0.0.1:{port}", None if which == "none" else other.authority)
    assert str(port) not in str(told.value)


async def test_a_certificate_for_another_host_is_refused_whoever_signed_it(tls: Authority) -> None:
    async with serving(tls) as port:
        with pytest.raises(Misconfigured, match="for another host") as told:
            await asked(f"https://localhost:{port}", tls.authority)
    assert "localhost" not in str(told.value)


@pytest.mark.parametrize(
    "make",
    [lambda path: None, lambda path: path.write_text("no PEM"), lambda path: path.touch(), lambda path: path.mkdir()],
    ids=["missing", "other", "empty", "folder"],
)
def test_a_file_that_holds_no_authority_is_named_at_start(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "ca.pem")
    settings = Settings(engine_url="https://127.0.0.1:1", engine_ca_file=tmp_path / "ca.pem")
    with pytest.raises(ConfigError, match=r"ROUTER_ENGINE_CA_FILE .*ca\.pem: (cannot be read|no certificates)"):
        make_engines(settings)


@pytest.mark.parametrize("engine", ["sglang", "openai_compat", "systemone"])
async def test_every_kind_of_engine_believes_the_file_that_the_setting_names(
    tls: Authority, engine: EngineName
) -> None:
    async with serving(tls) as port:
        settings = Settings(engine=engine, engine_url=f"https://127.0.0.1:{port}", engine_ca_file=tls.authority)
        ((_, client),) = make_engines(settings)
        try:
            with pytest.raises((ConfigError, EngineError), match="HTTP 401"):
                await client.identity()
        finally:
            await client.aclose()


async def test_what_writes_for_a_benchmark_believes_it_too(tls: Authority) -> None:
    async with serving(tls) as port:
        settings = Settings(engine_url=f"https://127.0.0.1:{port}", engine_ca_file=tls.authority)
        ((_, engine),) = make_engines(settings)
        writer = await make_writer(settings, engine)
        try:
            with pytest.raises(EngineError, match="HTTP 401"):
                await writer.write("prompt", ["a", "b"], "word")
        finally:
            await writer.aclose()
            await engine.aclose()
