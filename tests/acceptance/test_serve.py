"""`ticket-router serve`, as a helpdesk and as a stranger would ask it."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import jsonschema
import orjson
import pytest

from tests.acceptance.hostile import bodies
from tests.acceptance.served import COMMAND, TOKEN, Reply, ServeProcess, write_rules
from tests.integration.desk import StubProcess
from tests.integration.desk import http as get
from tests.waiting import wait_for
from worker.adapters.files import load_artefact, load_rule_set
from worker.core.envelope import envelope_json_schema
from worker.core.policy import Calibration, decide
from worker.core.scores import LabelScores

SUITE = Path(sys.executable).with_name("jevcompat")
SECRET = "xyzzy-personal-data"
NOUL = {"type": "noul", "instructions": "Is it so?"}


@pytest.fixture(scope="module")
def stub() -> Iterator[StubProcess]:
    with StubProcess() as engine:
        yield engine


@pytest.fixture(scope="module")
def desk(stub: StubProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """Calibrated, with a token."""
    folder = tmp_path_factory.mktemp("served")
    override = {"kind": "field", "name": "vip", "pointer": "/vip", "equals": True, "then": "escalate"}
    write_rules(folder, stub.url, overrides=[override])
    with ServeProcess(folder, stub.url) as server:
        yield server


@pytest.fixture(scope="module")
def small(stub: StubProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """Without a calibration or a token; few places, little time."""
    folder = tmp_path_factory.mktemp("small")
    write_rules(folder, stub.url, calibrated=False)
    limits = {"serve_concurrency": 8, "serve_deadline_s": 3, "max_ticket_bytes": 20_000}
    with ServeProcess(folder, stub.url, token=None, **limits) as server:
        yield server


def systemone(server: ServeProcess, question: object, state: object = "a text") -> Reply:
    return server.ask("/v1/systemone", {"model": "jev-latest", "state": state, "questions": {"q": question}})


# -- System One, by the public suite -----------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["desk", "small"])
def test_the_public_conformance_suite_finds_every_must_kept(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    server: ServeProcess = request.getfixturevalue(which)
    report = tmp_path / "report.json"
    key = ["--key", server.token] if server.token is not None else []
    done = subprocess.run(
        [str(SUITE), "test", server.url, *key, "--json", str(report)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    summary = json.loads(report.read_text())["summary"]
    assert summary["verdict"] == "conformant"
    assert summary["MUST"] == {"passed": 32, "failed": 0, "skipped": 1, "tested": 32}  # one is for the other server


def test_typed_answers_say_that_they_are_uncalibrated(desk: ServeProcess) -> None:
    options = {"type": "choice", "criteria": {"a": None, "b": None, "c": None}}
    body = systemone(desk, options).json
    found = body["answers"]["q"]
    assert body["x_calibrated"] is False
    assert 0 < found["x_label_mass"] <= 1
    assert found["confidence"] == pytest.approx((3 * max(found["probabilities"].values()) - 1) / 2)


# -- decisions ---------------------------------------------------------------------------------------------------------


def test_a_ticket_is_decided_as_the_calibration_allows(desk: ServeProcess, small: ServeProcess) -> None:
    ticket = {"id": "T-1", "subject": "Help", "body": "a question about login"}
    certified, uncalibrated = (server.ask("/v1/decide", ticket).json for server in (desk, small))
    assert (certified["action"], certified["topic"]) == ("route", "served.login")
    assert certified["reasons"][0]["code"] == "certified"
    assert (uncalibrated["action"], uncalibrated["probability"]) == ("escalate", None)
    assert uncalibrated["reasons"][0]["code"] == "uncalibrated"
    for envelope in (certified, uncalibrated):
        jsonschema.validate(envelope, envelope_json_schema())


def test_modes_and_the_brake_hold_over_http_and_typed_questions_have_none(
    stub: StubProcess, desk: ServeProcess, tmp_path: Path
) -> None:
    write_rules(tmp_path, stub.url, categories={"bug": {"mode": "shadow"}})
    with ServeProcess(tmp_path, stub.url, mode="assist") as braked:
        for word, mode in (("login", "assist"), ("bug", "shadow")):
            live, held = (server.ask("/v1/decide", {"text": f"about {word}"}).json for server in (desk, braked))
            assert (live["action"], live["mode"], live["would"]) == ("route", "auto", None)
            assert (held["action"], held["mode"], held["topic"]) == ("escalate", mode, "served.human")
            assert (held["would"]["topic"], held["would"]["reasons"]) == (f"served.{word}", live["reasons"])
            jsonschema.validate(held, envelope_json_schema())
        answers = [systemone(server, NOUL).json["answers"] for server in (desk, braked)]
        assert answers[0] == answers[1]


def test_the_decision_is_the_evaluators_own(desk: ServeProcess) -> None:
    """What the worker's evaluator makes of the scores that the answer states."""
    rule_set, artefact = load_rule_set(desk.folder), load_artefact(desk.folder / "calibration.json")
    assert artefact is not None
    for number, word in enumerate(("billing", "login", "bug", "weather")):
        envelope = desk.ask("/v1/decide", {"text": f"ticket {number} about {word}"}).json
        decision = decide(LabelScores.from_logprobs(tuple(envelope["label_scores"])), rule_set, Calibration(artefact))
        assert (envelope["action"], envelope["category"]) == (decision.action, decision.category)
        assert envelope["probability"] == decision.probability
        assert envelope["reasons"] == [asdict(why) for why in decision.reasons]


def test_overrides_hold_over_http_too(desk: ServeProcess) -> None:
    found = desk.ask("/v1/decide", {"id": "T-2", "text": "about billing", "metadata": {"vip": True}}).json
    assert (found["action"], found["reasons"][0]["code"]) == ("escalate", "override_escalation")


def test_asking_again_about_the_same_ticket_gives_the_same_decision_id(desk: ServeProcess) -> None:
    def decision_id(**ticket: str) -> str:
        found: str = desk.ask("/v1/decide", ticket).json["decision_id"]
        return found

    first = decision_id(id="T-3", text="about a bug")
    assert decision_id(id="T-3", text="about   a bug ") == first
    assert decision_id(id="T-4", text="about a bug") != first
    assert decision_id(id="T-3", text="about bugs") != first


def test_the_requests_of_the_documentation_are_answered(desk: ServeProcess) -> None:
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text(encoding="utf-8")
    ticket, typed = (json.loads(shown) for shown in re.findall(r"```json\n(.*?)```", page, re.DOTALL))
    assert desk.ask("/v1/decide", ticket).json["ticket_id"] == "T-1042"
    answers = desk.ask("/v1/systemone", typed).json["answers"]
    assert {name: found["type"] for name, found in answers.items()} == {
        "refund": "noul",
        "team": "choice",
        "anger": "score",
    }


# -- attacks -----------------------------------------------------------------------------------------------------------

HOSTILE = {
    "nothing": (b"", 400, "invalid_json"),
    "no JSON": (SECRET.encode(), 400, "invalid_json"),
    "NaN": (b'{"text": NaN}', 400, "invalid_json"),
    "deep": (b'{"text": ' + b"[" * 9_000 + b"]" * 9_000 + b"}", 400, "too_deep"),
    "a key twice": (b'{"text": "a", "text": "b"}', 400, "duplicate_key"),
    "half a character": (b'{"text": "\\ud800"}', 400, "lone_surrogate"),
    "Latin-1": (b'{"text": "\xe9"}', 400, "invalid_utf8"),
    "a list": (b"[]", 400, "not_an_object"),
    "no text": (b'{"id": 7}', 400, "no_text"),
    "a number for text": (b'{"text": 7}', 400, "wrong_type"),
    "too large": (orjson.dumps({"text": SECRET * 2_000}), 413, "too_large"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_bad_body_is_refused_with_what_where_and_what_to_do(small: ServeProcess, name: str) -> None:
    body, status, code = HOSTILE[name]
    reply = small.ask("/v1/decide", body)
    assert reply.status == status, reply
    detail = reply.json["detail"]
    assert detail["error_type"] == code
    assert detail["message"]
    assert detail["where"] == "body"
    assert detail["what_to_do"]
    assert SECRET.encode() not in reply.body
    typed = small.ask("/v1/systemone", body)
    assert typed.status in (413, 422), typed
    assert typed.json["detail"]


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Content-Type": "text/plain"}, b'{"text": "x"}', 415),
        ({"Content-Encoding": "gzip"}, gzip.compress(b'{"text": "' + b"x" * 10_000_000 + b'"}'), 415),
    ],
)
def test_other_than_plain_json_is_not_even_read(
    small: ServeProcess, headers: dict[str, str], body: bytes, status: int
) -> None:
    assert small.ask("/v1/decide", body, headers).status == status


def test_a_body_without_a_length_is_limited_too(small: ServeProcess) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", small.port, timeout=60)
    pieces = iter([b"x" * 1_000] * 100)
    connection.request("POST", "/v1/decide", pieces, {"Content-Type": "application/json"}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize("sent", [None, "Bearer", f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer \xff\xfe"])
@pytest.mark.parametrize("path", ["/v1/decide", "/v1/systemone", "/v1/models"])
def test_without_the_token_nothing_is_answered(desk: ServeProcess, path: str, sent: str | None) -> None:
    method = "GET" if path == "/v1/models" else "POST"
    headers = {"Authorization": sent if sent is not None else ""}
    reply = desk.ask(path, None if method == "GET" else {"text": "x"}, headers, method=method)
    assert (reply.status, reply.json["detail"]["error_type"]) == (401, "authentication_error")
    assert TOKEN.encode() not in reply.body


def test_paths_and_methods_that_are_not_there_are_json_errors(desk: ServeProcess) -> None:
    assert desk.ask("/v1/nothing", {}).json["detail"]["error_type"] == "not_found"
    other = desk.ask("/v1/decide", None, method="GET")
    assert (other.status, other.headers["allow"]) == (405, "POST")


def test_a_body_that_does_not_come_takes_a_place_for_the_deadline_only(small: ServeProcess) -> None:
    with socket.create_connection(("127.0.0.1", small.port), timeout=60) as slow:
        slow.sendall(
            b"POST /v1/decide HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n{"
        )
        wait_for(lambda: small.status()["in_flight"] == 1, "the slow request")
        assert slow.recv(4_096).startswith(b"HTTP/1.1 408 ")
    wait_for(lambda: small.status()["in_flight"] == 0, "its place")


def test_a_client_that_goes_away_gives_its_place_back_before_the_deadline(
    desk: ServeProcess, stub: StubProcess
) -> None:
    stub.tell(latency_s=60)
    try:
        with socket.create_connection(("127.0.0.1", desk.port), timeout=60) as gone:
            body = orjson.dumps({"text": "nobody waits for this"})
            lines = ["POST /v1/decide HTTP/1.1", "Host: x", "Content-Type: application/json"]
            lines += [f"Authorization: Bearer {TOKEN}", f"Content-Length: {len(body)}", "", ""]
            gone.sendall("\r\n".join(lines).encode() + body)
            wait_for(lambda: desk.status()["in_flight"] == 1, "the request")
        wait_for(lambda: desk.status()["in_flight"] == 0, "its place", 7)
    finally:
        stub.tell(latency_s=0.01)


def test_bytes_that_are_no_http_end_their_connection_and_nothing_else(small: ServeProcess) -> None:
    for sent in (b"SSH-2.0-x\r\n\r\n", b"\x16\x03\x01" * 99, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 9_000 + b"\r\n"):
        with socket.create_connection(("127.0.0.1", small.port), timeout=60) as raw:
            try:
                raw.sendall(sent)
                assert b" 200 " not in raw.recv(4_096)
            except ConnectionError:
                pass
    assert small.ask("/v1/decide", {"text": "still there?"}).status == 200


def memory_kib(server: ServeProcess) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmRSS:")[2].split()[0])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", ["/v1/decide", "/v1/systemone"])
def test_no_body_of_200_hostile_ones_fails_the_server_or_holds_it(small: ServeProcess, path: str) -> None:
    before = memory_kib(small)
    draw = random.Random(path)
    statuses: Counter[int] = Counter()
    for number, body in enumerate(bodies(len(path), 200)):
        kind = draw.choice(["application/json"] * 6 + ["application/x+json; charset=utf-7", "text/plain", "", "\x00;;"])
        reply = small.ask(path, body, {"Content-Type": kind})
        assert reply.status in {200, 400, 413, 415, 422, 503}, (number, body[:200], reply.body[:300])
        assert isinstance(reply.json if reply.headers["content-type"] == "application/json" else {}, dict)
        statuses[reply.status] += 1
    assert statuses[200] >= 5 and statuses[503] < 20, statuses
    assert small.status()["in_flight"] == 0
    assert memory_kib(small) - before < 100_000
    assert small.ask("/v1/decide", {"text": "still there?"}).status == 200


@pytest.mark.timeout(300)
def test_clients_that_never_end_take_neither_places_nor_memory(small: ServeProcess) -> None:
    before = memory_kib(small)
    head = b"POST /v1/decide HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with ExitStack() as stack:
        for sent in [b"POST /v1/dec", head] * 50:  # slow heads: 100 connections that say nothing more
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", small.port), timeout=60))
            slow.sendall(sent)
        endless = stack.enter_context(socket.create_connection(("127.0.0.1", small.port), timeout=60))
        endless.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(20_000):  # chunks without an end, 10 MB or until it is told to stop
                endless.sendall(b"200\r\n" + b" " * 0x200 + b"\r\n")
            assert endless.recv(4_096).startswith(b"HTTP/1.1 413 ")
        trickle = stack.enter_context(socket.create_connection(("127.0.0.1", small.port), timeout=60))
        trickle.sendall(head + b"Content-Length: 9000\r\n\r\n{")
        assert small.ask("/v1/decide", {"text": "and the others?"}).status == 200
        assert trickle.recv(4_096).startswith(b"HTTP/1.1 408 ")
    wait_for(lambda: small.status()["in_flight"] == 0, "their places")
    assert memory_kib(small) - before < 100_000


@pytest.mark.parametrize("language", [5, 1.5, True, ["en"], {"code": "en"}])
def test_a_language_that_is_no_string_is_refused_by_name(small: ServeProcess, language: object) -> None:
    reply = small.ask("/v1/decide", {"text": "about a bug", "language": language})
    assert (reply.status, reply.json["detail"]["error_type"]) == (400, "wrong_type")
    assert reply.json["detail"]["message"].startswith("language is a ")


def test_a_header_that_is_none_is_not_sent_back(small: ServeProcess) -> None:
    with socket.create_connection(("127.0.0.1", small.port), timeout=60) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nX\x01: " + SECRET.encode() + b"\r\n\r\n")
        answered = raw.recv(4_096)
    assert answered.startswith(b"HTTP/1.") and b" 400 " in answered[:20] and SECRET.encode() not in answered
    assert SECRET not in small.log.read_text(errors="replace")


# -- load and outages --------------------------------------------------------------------------------------------------


def test_200_requests_at_once_stay_within_the_limits_and_each_is_answered(
    small: ServeProcess, stub: StubProcess
) -> None:
    stub.tell(latency_s=0.2)
    start = threading.Barrier(201)

    def ask(number: int) -> Reply:
        start.wait(120)
        if number % 2:
            return systemone(small, NOUL, f"load {number}")
        return small.ask("/v1/decide", {"id": str(number), "text": f"load {number} about a bug"})

    try:
        with ThreadPoolExecutor(200) as clients:
            asked = [clients.submit(ask, number) for number in range(200)]
            start.wait(120)
            assert get(f"{small.url}/livez")[0] == 200
            replies = [each.result() for each in asked]
    finally:
        stub.tell(latency_s=0.01)
    assert {reply.status for reply in replies} <= {200, 503}
    assert any(reply.status == 200 for reply in replies)
    turned_away = [reply for reply in replies if reply.status == 503]
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in turned_away)
    status = small.status()
    assert status["most_in_flight"] <= 8
    assert status["in_flight"] == 0
    assert small.ask("/v1/decide", {"text": "and now?"}).status == 200


def test_with_the_engine_down_nothing_is_decided_and_clients_are_told_to_come_again(
    small: ServeProcess, stub: StubProcess
) -> None:
    before = systemone(small, NOUL).status
    stub.kill()
    try:
        for attempt in range(3):
            for reply in (
                small.ask("/v1/decide", {"text": f"nobody scores this {attempt}"}),
                systemone(small, NOUL, f"nor this {attempt}"),
                systemone(small, {"type": "choice", "criteria": {"new": None, str(attempt): None}}),
            ):
                assert reply.status == 503, reply
                assert reply.headers["retry-after"]
                assert "action" not in reply.json
        wait_for(lambda: get(f"{small.url}/readyz")[0] == 503, "not being ready")
        assert get(f"{small.url}/livez")[0] == 200
    finally:
        stub.start()
    wait_for(lambda: small.ready, "the engine's return")
    assert (before, small.ask("/v1/decide", {"text": "nobody scores this 0"}).status) == (200, 200)


def test_sigterm_finishes_what_was_asked_and_takes_no_more(stub: StubProcess, tmp_path: Path) -> None:
    write_rules(tmp_path, stub.url)
    with ServeProcess(tmp_path, stub.url) as server:
        stub.tell(latency_s=3)
        try:
            with ThreadPoolExecutor(2) as clients:
                asked = clients.submit(server.ask, "/v1/decide", {"text": "take your time with this bug"})
                wait_for(lambda: server.status()["in_flight"] == 1, "the request")
                ended = clients.submit(server.terminate)
                wait_for(lambda: get(f"{server.url}/readyz")[0] == 503, "not being ready")
                late = server.ask("/v1/decide", {"text": "too late"})
                assert (late.status, late.json["detail"]["error_type"]) == (503, "stopping")
                assert asked.result().status == 200
                assert ended.result() == 0
        finally:
            stub.tell(latency_s=0.01)


# -- starting, and what is written down --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ROUTER_SERVE_HOST": "0.0.0.0"}, "set ROUTER_SERVE_TOKEN"),
        ({"ROUTER_SERVE_TOKEN": "too short"}, "ROUTER_SERVE_TOKEN"),
        ({"ROUTER_SERVE_TOKEN": "long enough but with spaces"}, "ROUTER_SERVE_TOKEN"),
        ({}, "ROUTER_ENGINE_URL"),
    ],
)
def test_a_server_that_must_not_start_says_why_in_one_line(settings: dict[str, str], said: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROUTER_")}
    done = subprocess.run(
        [str(COMMAND), "serve", "--rules", "routing_rules/helpdesk"],
        env=environment | settings,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not any(value in done.stderr for name, value in settings.items() if name == "ROUTER_SERVE_TOKEN")


def test_metrics_count_answers_and_nobodys_words_are_in_them_or_in_the_log(desk: ServeProcess) -> None:
    desk.ask("/v1/decide", {"id": SECRET, "text": f"about billing, {SECRET}"})
    desk.ask("/v1/decide", f'{{"text": "{SECRET}'.encode())
    desk.ask(f"/v1/{SECRET}", {})
    systemone(desk, {"type": "choice", "criteria": {SECRET: SECRET, "b": SECRET}}, SECRET)
    systemone(desk, {"type": SECRET}, SECRET)
    metrics = get(f"http://127.0.0.1:{desk.health_port}/metrics")[1].decode()
    assert 'ticket_router_http_requests_total{route="/v1/decide",status="400"}' in metrics
    assert 'ticket_router_http_requests_total{route="other",status="404"}' in metrics
    log = desk.log.read_text(errors="replace")
    assert "ticket.decided" in log
    for written in (metrics, log):
        assert SECRET not in written
        assert TOKEN not in written
