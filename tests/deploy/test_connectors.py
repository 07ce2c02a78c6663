"""Connectors: linted, tested and run by the engine of Redpanda Connect; what they send in is what the worker reads."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from tests.integration.desk import http
from tests.servers.programs import connect
from tests.servers.redis_server import free_port
from tests.waiting import wait_for
from worker.adapters.tied_process import TiedProcess
from worker.core.ticket import Intake, parse_ticket

ROOT = Path(__file__).parents[2]
CONNECTORS = sorted((ROOT / "deploy/connectors").glob("*.yaml"))
PAYLOADS = ROOT / "tests/core/payloads"
SECRET = "a secret for the tests only"
SECRETS = dict.fromkeys(("ZENDESK_SECRET", "ZAMMAD_SECRET", "OPEN311_TOKEN", "WEBHOOK_SECRET"), SECRET)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, **SECRETS, "WEBHOOK_URL": "http://127.0.0.1:9/", **more}


@pytest.mark.parametrize("path", CONNECTORS, ids=lambda path: path.stem)
def test_the_engine_takes_the_configuration_and_its_own_tests_pass(path: Path) -> None:
    for command in ("lint", "test"):
        ended = subprocess.run(
            [connect(), command, path], env=environment(), capture_output=True, text=True, timeout=60, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_lint_refuses_what_is_misspelt(tmp_path: Path) -> None:
    broken = yaml.safe_load((ROOT / "deploy/connectors/decisions.yaml").read_text(encoding="utf-8"))
    broken["input"]["redpanda"]["isolation_level"] = "read_committed"
    (tmp_path / "broken.yaml").write_text(yaml.safe_dump(broken))
    ended = subprocess.run(
        [connect(), "lint", tmp_path / "broken.yaml"], env=environment(), capture_output=True, timeout=60, check=False
    )
    assert ended.returncode != 0


def test_decisions_are_read_without_those_of_aborted_transactions() -> None:
    config = yaml.safe_load((ROOT / "deploy/connectors/decisions.yaml").read_text(encoding="utf-8"))
    assert config["input"]["redpanda"]["transaction_isolation_level"] == "read_committed"


@contextmanager
def running(name: str, folder: Path, **more: str) -> Iterator[str]:
    """The connector's base URL, while it runs."""
    address = f"127.0.0.1:{free_port()}"
    settings = {**SECRETS, "WEBHOOK_URL": "", "ADDRESS": address, "STAND_IN_OUT": str(folder / "out.jsonl"), **more}
    named = [f"{key}={value}" for key, value in settings.items()]
    command = ["env", *named, str(connect()), "run", str(ROOT / f"deploy/connectors/{name}.yaml")]
    process = TiedProcess(command, log=folder / "connect.log")
    try:
        yield f"http://{address}"
    finally:
        process.kill()


def post(url: str, body: bytes, headers: dict[str, str]) -> int:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        return error.code


def kept(folder: Path) -> list[dict[str, Any]]:
    out = folder / "out.jsonl"
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []


def zendesk_headers(body: bytes) -> dict[str, str]:
    at = "2026-03-02T08:14:52Z"
    digest = hmac.new(SECRET.encode(), at.encode() + body, hashlib.sha256).digest()
    return {
        "X-Zendesk-Webhook-Signature-Timestamp": at,
        "X-Zendesk-Webhook-Signature": base64.b64encode(digest).decode(),
    }


def zammad_headers(body: bytes) -> dict[str, str]:
    return {"X-Hub-Signature": "sha1=" + hmac.new(SECRET.encode(), body, hashlib.sha1).hexdigest()}


def open311_headers(_: bytes) -> dict[str, str]:
    return {"Authorization": f"Bearer {SECRET}"}


@pytest.mark.parametrize(
    ("name", "headers", "topic", "key", "says"),
    [
        ("zendesk", zendesk_headers, "tickets.helpdesk", "35436", "charged twice for March"),
        ("zammad", zammad_headers, "tickets.helpdesk", "10081", 'the printer says "paper jam, tray 2" & there is no'),
        ("open311", open311_headers, "tickets.civil_complaints", "638344", "은빛로 12길 가로등이"),
    ],
)
def test_a_webhook_becomes_a_ticket_that_the_worker_reads_and_a_forged_one_does_not(
    tmp_path: Path, name: str, headers: Any, topic: str, key: str, says: str
) -> None:
    body = (PAYLOADS / f"{name}.json").read_bytes()
    with running(name, tmp_path) as url:
        wait_for(lambda: http(url)[0] != 0, "the connector")
        assert post(f"{url}/{name}", body, {}) == 401
        assert post(f"{url}/{name}", body + b" ", headers(body) if name != "open311" else {}) == 401
        assert post(f"{url}/{name}", b"[]" if name != "open311" else b"{}", headers(b"[]")) == 400
        assert kept(tmp_path) == []
        assert post(f"{url}/{name}", body, headers(body)) == 200
    (record,) = kept(tmp_path)
    assert (record["topic"], record["key"]) == (topic, key)
    ticket = parse_ticket(record["value"].encode(), Intake(), 500_000)
    assert ticket.id == key
    assert says in ticket.text
    assert "<div" not in ticket.text
    assert ticket.created_at


def test_a_decision_reaches_the_webhook_signed_and_one_that_it_refuses_is_kept_aside(tmp_path: Path) -> None:
    received: list[tuple[str, str, bytes]] = []

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            key = self.headers["Idempotency-Key"]
            received.append((key, self.headers["X-Signature"], body))
            self.send_response(422 if key == "d2" else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    decisions = [
        {"decision_id": name, "ticket_id": name, "tenant": None, "action": "escalate", "category": None}
        | {"topic": "helpdesk.human", "probability": None, "reasons": [], "decided_at": "2026-03-02T08:14:52Z"}
        | {"label_scores": [-1.0]}
        for name in ("d1", "d2", "d3")
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(decision) + "\n" for decision in decisions))
    with ThreadingHTTPServer(("127.0.0.1", 0), Webhook) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        with running("decisions", tmp_path, WEBHOOK_URL=url, STAND_IN_IN=str(tmp_path / "in.jsonl")):
            wait_for(lambda: len(received) >= 3 and bool(kept(tmp_path)), "the decisions")
        server.shutdown()
    assert sorted(key for key, _, _ in received) == ["d1", "d2", "d3"]  # a definite no is not asked again
    for _, signature, body in received:
        assert signature == hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
        assert b"label_scores" not in body
    (aside,) = kept(tmp_path)
    assert (aside["topic"], aside["key"]) == ("helpdesk.decisions.undelivered", "d2")
