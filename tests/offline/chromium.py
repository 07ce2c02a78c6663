"""Opens a page in headless Chromium over its debugging protocol, and says what the page did."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

START_S = 90.0
ANSWER_S = 60.0
COMPLAINTS = {"Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"}


@dataclass
class Visit:
    """What a page asked for, complained about and looked like."""

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    screenshot: bytes = b""
    values: dict[str, Any] = field(default_factory=dict)


def chromium() -> str:
    """Its path. Missing, it fails the test where CI is set, and skips it elsewhere."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (found := shutil.which(name)) is not None:
            return found
    if os.environ.get("CI"):
        pytest.fail("no chromium on PATH: apt-get install chromium fonts-noto-cjk")
    pytest.skip("no chromium on PATH: apt-get install chromium fonts-noto-cjk")


async def visit(page: Path, folder: Path, scripts: Mapping[str, str], widths: Sequence[int] = (1200,)) -> list[Visit]:
    """Open the page (an absolute path) in a window of each width, run each script in it for its value, and take a
    picture of all of it.
    """
    async with _browser(folder) as port, aiohttp.ClientSession() as http:
        return [await _visit(http, port, page.as_uri(), scripts, width) for width in widths]


async def _visit(http: aiohttp.ClientSession, port: int, url: str, scripts: Mapping[str, str], width: int) -> Visit:
    async with http.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
        address = (await answer.json())["webSocketDebuggerUrl"]
    async with http.ws_connect(address, max_msg_size=0) as socket:
        tab = _Tab(socket)
        for domain in ("Network", "Log", "Runtime", "Page"):
            await tab.call(f"{domain}.enable")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        await tab.call("Emulation.setDeviceMetricsOverride", **size)
        await tab.call("Page.navigate", url=url)
        await tab.until("Page.loadEventFired")
        found = Visit()
        for name, script in scripts.items():
            result = await tab.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
            found.values[name] = result["result"].get("value")
        picture = await tab.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        found.screenshot = base64.b64decode(picture["data"])
        asked = [event["params"] for event in tab.events if event["method"] == "Network.requestWillBeSent"]
        found.requests = [event["request"]["url"] for event in asked]
        found.complaints = [json.dumps(event["params"]) for event in tab.events if event["method"] in COMPLAINTS]
        return found


@dataclass
class _Tab:
    socket: aiohttp.ClientWebSocketResponse
    events: list[dict[str, Any]] = field(default_factory=list)
    calls: int = 0

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.calls += 1
        await self.socket.send_json({"id": self.calls, "method": method, "params": parameters})
        while True:
            message = await self._receive()
            if message.get("id") == self.calls:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    async def until(self, method: str) -> None:
        while not any(event["method"] == method for event in self.events):
            await self._receive()

    async def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = await self.socket.receive_json(timeout=ANSWER_S)
        if "method" in message:
            self.events.append(message)
        return message


@contextlib.asynccontextmanager
async def _browser(folder: Path) -> AsyncIterator[int]:
    profile = folder / "chromium"
    (profile / "DevToolsActivePort").unlink(missing_ok=True)
    process = subprocess.Popen(  # noqa: ASYNC220 - returns at once
        [
            chromium(),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--hide-scrollbars",
            "--no-first-run",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "about:blank",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield await _port(profile / "DevToolsActivePort")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its renderers too
        process.wait()


async def _port(file: Path) -> int:
    async with asyncio.timeout(START_S):
        while True:
            with contextlib.suppress(FileNotFoundError, IndexError, ValueError):
                return int(file.read_text().splitlines()[0])  # noqa: ASYNC240 - one short line
            await asyncio.sleep(0.1)
