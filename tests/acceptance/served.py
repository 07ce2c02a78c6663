"""A `ticket-router serve` process with a rule set and a stub engine, and a plain HTTP client for it."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import yaml

from tests.core.sets import artefact, category_set
from tests.integration.desk import http as get
from tests.servers.redis_server import free_port
from tests.waiting import wait_for
from worker.adapters.files import load_rule_set
from worker.adapters.sglang import SGLangEngine
from worker.runtime.question import prepare_question

COMMAND = Path(sys.executable).with_name("ticket-router")
TOKEN = "token-for-the-tests-only"
LABELS = ("billing", "login", "bug")


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


def write_rules(folder: Path, engine_url: str, *, calibrated: bool = True, **rules: object) -> None:
    """A rule set whose calibration fits the engine at this address; its numbers are made up."""
    base = category_set(*LABELS).model_copy(update={"id": "served"})
    for name, content in (
        ("categories.yaml", base.model_dump(mode="json", exclude_defaults=True)),
        ("rules.yaml", {"version": 1, "alpha": 0.1, "delta": 0.1, **rules}),
    ):
        (folder / name).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    if not calibrated:
        return
    rule_set = load_rule_set(folder)

    async def fingerprints() -> Any:
        engine = SGLangEngine(engine_url)
        try:
            return (await prepare_question(rule_set, engine)).fingerprints
        finally:
            await engine.aclose()

    made = artefact(rule_set, fingerprints=asyncio.run(fingerprints()))
    (folder / "calibration.json").write_bytes(made.to_bytes())


class ServeProcess:
    """One `ticket-router serve`, ready inside the block."""

    def __init__(self, folder: Path, engine_url: str, token: str | None = TOKEN, **settings: object) -> None:
        self.port, self.health_port = free_port(), free_port()
        self.token = token
        self.log = folder / f"serve-{self.port}.log"
        self.folder = folder
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("ROUTER_", "OTEL_"))},
            "ROUTER_ENGINE_URL": engine_url,
            "ROUTER_HTTP_PORT": str(self.health_port),
            "ROUTER_SERVE_PORT": str(self.port),
            **({} if token is None else {"ROUTER_SERVE_TOKEN": token}),
            **{f"ROUTER_{name.upper()}": str(value) for name, value in settings.items()},
        }

    def __enter__(self) -> ServeProcess:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(COMMAND), "serve", "--rules", str(self.folder)],
                env=self._environment,
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )
        wait_for(lambda: self.ready or self.process.poll() is not None, f"readiness; {self.tail()}", 90)
        assert self.process.poll() is None, self.tail()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ready(self) -> bool:
        return get(f"{self.url}/readyz")[0] == 200

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = orjson.loads(get(f"http://127.0.0.1:{self.health_port}/status")[1])
        return status

    def ask(
        self,
        path: str,
        body: object,
        headers: Mapping[str, str] | None = None,
        *,
        method: str = "POST",
        timeout_s: float = 60,
    ) -> Reply:
        """`body` as JSON, or bytes as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        sent = body if isinstance(body, bytes) else None if body is None else orjson.dumps(body)
        known = {"Content-Type": "application/json"}
        if self.token is not None:
            known["Authorization"] = f"Bearer {self.token}"
        try:
            connection.request(method, path, sent, {**known, **(headers or {})})
            answer = connection.getresponse()
            return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def terminate(self, timeout_s: float = 60) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]
