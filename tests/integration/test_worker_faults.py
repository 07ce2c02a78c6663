"""The installed worker on a real Kafka, over engines, logs, collectors and tickets that misbehave."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import orjson
import pytest
import redis

from tests.adapters.test_files import CATEGORIES
from tests.core.test_ticket import NO_TICKETS
from tests.integration.desk import COMMAND, LABELS, Desk, StubProcess, WorkerProcess, http
from tests.servers.kafka import ApacheKafka
from tests.servers.redis_server import redis_server
from tests.waiting import wait_for
from worker.core.envelope import DEAD_LETTER_REASON
from worker.ports import Output

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(400)]

OTEL = {
    "OTEL_TRACES_SAMPLER": "always_on",
    "OTEL_BSP_SCHEDULE_DELAY": "200",
    "OTEL_METRIC_EXPORT_INTERVAL": "500",
}


def metric(worker: WorkerProcess, *parts: str) -> float:
    """The sum of the samples whose line holds all of these."""
    lines = http(f"http://127.0.0.1:{worker.port}/metrics")[1].decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#" and all(p in line for p in parts))


def events(worker: WorkerProcess, event: str) -> list[dict[str, object]]:
    lines = worker.log.read_bytes().splitlines()
    return [found for line in lines if line.startswith(b"{") and (found := orjson.loads(line))["event"] == event]


def _readyz(worker: WorkerProcess) -> str:
    return http(f"http://127.0.0.1:{worker.port}/readyz")[1].decode()


def _failures(desk: Desk) -> set[str]:
    """Why people got tickets, as far as it was an engine's doing or the worker's own."""
    decisions = (orjson.loads(record.value or b"") for record in desk.records(desk.rules.decisions_topic))
    codes = {decision["reasons"][0]["code"] for decision in decisions}
    return {code for code in codes if code.startswith(("engine_", "internal_", "invalid_"))}


def test_of_two_engines_one_that_is_killed_costs_nothing_and_is_used_again_when_it_is_back(
    tmp_path: Path, apache_kafka: ApacheKafka, engine: StubProcess
) -> None:
    with StubProcess() as other:
        desk = Desk(tmp_path, apache_kafka.bootstrap_servers, engine.url)
        desk.environment["ROUTER_ENGINE_URL"] = f"{engine.url}, {other.url}/"
        with desk.worker(batch_items=4) as worker:
            ids = desk.send(200)
            desk.wait_for_all(ids)
            for stub in (engine, other):
                assert stub.tell()["counters"]["items"] > 20, "both do their share"
            other.kill()
            ids += desk.send(200, first=200)
            desk.wait_for_all(ids)
            wait_for(lambda: metric(worker, "endpoint_up", "engine-2") == 0, "the breaker")
            assert worker.ready()
            assert _readyz(worker).startswith("ready, but degraded: engine is down: engine-2: ")
            other.start()
            wait_for(lambda: metric(worker, "endpoint_up", "engine-2") == 1, "readmission")
            before = other.tell()["counters"]["items"]
            for _ in range(20):  # it gets few calls at first
                ids += desk.send(100, first=len(ids))
                desk.wait_for_all(ids)
                if other.tell()["counters"]["items"] > before + 50:
                    break
            else:
                pytest.fail("it is up again and gets no work")
            assert len(events(worker, "partitions.assigned")) == 1, "no rebalance for any of it"
    assert not _failures(desk), "somebody was escalated for it"


def test_an_engine_that_mixes_up_rows_is_found_out_within_a_minute_and_tickets_wait_until_it_is_well(
    desk: Desk, engine: StubProcess
) -> None:
    with desk.worker() as worker:
        desk.wait_for_all(desk.send(100))
        assert worker.status()["engine_alarm"] is None
        assert metric(worker, "row_checks", "mixed_up") == 0
        try:
            engine.tell(fault="swapped_rows")
            began = time.monotonic()
            late: list[str] = []
            while worker.status()["engine_up"]:
                late += desk.send(20, first=1_000 + len(late))
                assert time.monotonic() - began < 60, "no alarm within a minute"
                time.sleep(0.2)
            waiting = desk.send(50, first=100_000)
            assert "another's" in worker.status()["engine_alarm"]
            assert b"another's" in http(f"http://127.0.0.1:{worker.port}/readyz")[1]
            assert metric(worker, "row_checks", "mixed_up", "engine-1") >= 3
            assert len(events(worker, "engine.rows_mixed_up")) == 1
        finally:
            engine.tell(fault="none")
        found = desk.wait_for_all(late + waiting)
        wait_for(worker.ready, "readiness")
        assert _readyz(worker).startswith("ready, but degraded: engine mixes up rows: engine-1: "), "for 5 minutes more"
    for ticket in waiting:
        assert set(found[ticket]) <= {f"{desk.rules.id}.{LABELS[int(ticket[1:]) % 3]}", desk.rules.human_topic}
    assert _failures(desk) <= {"invalid_answer"}


def test_a_model_that_answers_all_examples_alike_is_said_to_be_unwatched_and_raises_no_alarm(
    desk: Desk, engine: StubProcess
) -> None:
    strength = engine.tell()["behaviour"]["strength"]
    try:
        engine.tell(strength=0.1)
        with desk.worker() as worker:
            assert len(events(worker, "engine.rows_unwatched")) == 1
            desk.wait_for_all(desk.send(100))
            assert worker.status()["engine_alarm"] is None
            assert metric(worker, "row_checks") == 0
    finally:
        engine.tell(strength=strength)


@contextlib.contextmanager
def _stuck_log(kind: str, folder: Path) -> Iterator[int]:
    if kind == "a full disk":
        with Path("/dev/full").open("wb") as full:
            yield full.fileno()
        return
    os.mkfifo(folder / "log")
    reader = os.open(folder / "log", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(folder / "log", os.O_WRONLY)
    try:
        yield writer
    finally:
        os.close(writer)
        os.close(reader)


@pytest.mark.parametrize(
    ("log", "collector"),
    [("a full disk", "silent"), ("a pipe that nobody reads", "closed"), ("a pipe that nobody reads", "refusing")],
)
def test_neither_a_stuck_log_nor_a_collector_that_is_away_costs_a_ticket_or_holds_up_the_end(
    desk: Desk, tmp_path: Path, log: str, collector: str
) -> None:
    with contextlib.ExitStack() as stack:
        if collector == "refusing":
            url = stack.enter_context(_collector([], status=503))
        else:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            if collector == "closed":
                listener.close()
        desk.environment |= {**OTEL, "OTEL_EXPORTER_OTLP_ENDPOINT": url}
        ids = desk.send(500)
        stuck = stack.enter_context(_stuck_log(log, tmp_path))
        worker = WorkerProcess(desk, log_to=stuck, log_level="debug")
        stack.callback(worker.kill)
        worker.wait_ready()
        slowest_s = 0.0
        while worker.status().get("settled", 0) < len(ids):
            began = time.monotonic()
            assert http(f"http://127.0.0.1:{worker.port}/livez")[0] == 200
            slowest_s = max(slowest_s, time.monotonic() - began)
            time.sleep(0.02)
        assert slowest_s < 4.5, "the loop waited for somebody"  # as long as the question is asked for
        wait_for(lambda: metric(worker, "log_lines_dropped") > (400 if log == "a full disk" else 0), "dropped lines")
        began = time.monotonic()
        assert worker.terminate() == 0
        assert time.monotonic() - began < 20, "an end that waits for a collector"
    desk.wait_for_all(ids)
    assert not _failures(desk)


def test_bytes_of_every_kind_that_are_no_ticket_are_one_dead_letter_each_as_they_came(desk: Desk) -> None:
    ids = desk.send(3)
    for _, value, _ in NO_TICKETS:
        desk.send_raw(value)
    ids += desk.send(3, first=3)
    with desk.worker() as worker:
        wait_for(lambda: worker.status()["settled"] == len(NO_TICKETS) + 6, "everything to end")
        assert worker.ready()
        desk.wait_for_all(ids)
    found = [(r.value, dict(r.headers)[DEAD_LETTER_REASON]) for r in desk.records(desk.rules.dead_letter_topic)]
    assert sorted(found, key=repr) == sorted(((value, code.encode()) for _, value, code in NO_TICKETS), key=repr)


# -- secrets -----------------------------------------------------------------------------------------------------------

TEXT = "Marzipankreuzworträtsel"
KEY, METADATA = "Wasserfallschlüssel", "Glockenturmnotiz"
API_KEY, REDIS_PASSWORD, CACHE_SECRET = "sk-Zitronenfalter", "Bernsteinkette", "Nachtigallengesang-1234"
FAULTS: tuple[dict[str, object], ...] = (
    {"fault": "close", "times": 2},
    {"fault": "canned", "times": 2, "canned": {"status": 400, "answer": {"message": f"bad item {TEXT} {API_KEY}"}}},
    {"fault": "canned", "times": 2, "canned": {"status": 500, "answer": f"<html>{TEXT} {API_KEY}</html>"}},
    {"fault": "html", "times": 2},
    {"fault": "nan", "times": 2},
    {"fault": "not_http", "times": 2},
    {"fault": "redirect", "times": 2},
    {"fault": "status", "status": 401, "times": 2},
    {"fault": "none", "refused": f"{TEXT} refused"},
    {"fault": "none", "poison": f"{TEXT} poison"},
)


@contextlib.contextmanager
def _collector(bodies: list[bytes], status: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            bodies.append(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_nothing_that_a_worker_tells_under_faults_holds_ticket_text_address_or_key(
    tmp_path: Path, apache_kafka: ApacheKafka
) -> None:
    told: dict[str, bytes] = {}
    spans: list[bytes] = []
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(StubProcess())
        redis_url = stack.enter_context(redis_server("--requirepass", REDIS_PASSWORD))
        redis_url = redis_url.replace("redis://", f"redis://:{REDIS_PASSWORD}@")
        desk = Desk(tmp_path, apache_kafka.bootstrap_servers, engine.url)
        engine.tell(api_key=API_KEY)
        desk.environment |= {
            **OTEL,
            "OTEL_EXPORTER_OTLP_ENDPOINT": stack.enter_context(_collector(spans)),
            "ROUTER_ENGINE_API_KEY": API_KEY,
            "ROUTER_REDIS_URL": redis_url,
            "ROUTER_CACHE_SECRET": CACHE_SECRET,
            "ROUTER_LOG_LEVEL": "debug",
        }
        worker = stack.enter_context(desk.worker(engine_attempts=2, redis_timeout_ms=10_000))
        client = redis.Redis.from_url(redis_url)
        sent = 0
        for fault in FAULTS:
            engine.tell(**{"fault": "none", "times": None, "refused": None, "poison": None} | fault)
            for kind in ("plain", "refused", "poison"):
                body = {"id": f"t{sent}", "text": f"{TEXT} {kind} {sent} billing", "metadata": {"note": METADATA}}
                _send(desk, orjson.dumps(body))
                sent += 1
            told[f"readyz {fault}"] = http(f"http://127.0.0.1:{worker.port}/readyz")[1]
            wait_for(lambda: worker.status()["settled"] == sent, f"the tickets under {fault}")  # noqa: B023
        engine.tell(fault="none", times=None, refused=None, poison=None)
        twice = f'{{"text": "{TEXT}", "text": "{TEXT}"}}'
        for bad in (f'{{"text": "{TEXT}', twice, f'"{TEXT}"', f'{{"text": ["{TEXT}"]}}'):
            _send(desk, bad.encode())
            sent += 1
        for name in client.scan_iter():
            client.delete(name)
            client.rpush(name, TEXT)  # a value of another type, about which the server complains
        for number in range(0, 12, 3):
            _send(desk, orjson.dumps({"id": f"again{number}", "text": f"{TEXT} plain {number} billing"}))
            sent += 1
        wait_for(lambda: worker.status()["settled"] == sent, "the rest")
        wait_for(lambda: b"string" in map(client.type, client.scan_iter()), "scores in Redis")  # behind a ticket's back
        for name in client.scan_iter():
            told[f"redis {name!r}"] = name
            if client.type(name) == b"string":
                told[f"redis value {name!r}"] = client.get(name) or b""
        for page in ("metrics", "status", "readyz", "livez"):
            told[page] = http(f"http://127.0.0.1:{worker.port}/{page}")[1]
        assert metric(worker, "dead_letters") == 4
        assert worker.terminate() == 0
        told["log"] = worker.log.read_bytes()
    told |= {f"export {number}": body for number, body in enumerate(spans)}
    for record in desk.records(desk.rules.decisions_topic):
        told[f"decision {record.offset}"] = record.value or b""
    for record in desk.records(*desk.ends):
        told[f"headers {record.partition} {record.offset}"] = repr(record.headers).encode()
    assert told["log"].count(b'"ticket.decided"') >= sent - 4, "or there was nothing to look at"
    assert any(b"ticket" in body for body in spans)
    assert len([name for name in told if name.startswith("redis value")]) > 0
    assert len([name for name in told if name.startswith("decision")]) >= sent - 4
    addresses = (f"127.0.0.1:{engine.port}", redis_url.partition("@")[2].partition("/")[0])
    for secret in (TEXT, KEY, METADATA, API_KEY, REDIS_PASSWORD, CACHE_SECRET, *addresses):
        for spelled in _spellings(secret):
            assert not [where for where, what in told.items() if spelled in what], secret


def _spellings(secret: str) -> set[bytes]:
    """As bytes, and as JSON, `repr` and `ascii` write it."""
    raw = secret.encode()
    return {raw, json.dumps(secret)[1:-1].encode(), repr(raw)[2:-1].encode(), ascii(secret)[1:-1].encode()}


def _send(desk: Desk, value: bytes) -> None:
    desk._writer.write(Output(desk.rules.input_topic, KEY.encode(), value))
    desk._writer.flush(60)


BAD_RULES = {
    "broken": ("version: 1\nalpha: [0.1\ndelta: 0.1\n", ":3: not YAML"),
    "not a number": ("version: 1\nalpha: .nan\ndelta: 0.1\n", ":2: .nan is not a number"),
    "a key twice": ("version: 1\nalpha: 0.1\ndelta: 0.1\nalpha: 0.5\n", ":4: key 'alpha' stands twice"),
    "an alias bomb": ("a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n", ":1: anchors and aliases are not allowed"),
    "an unknown category": ("version: 1\nalpha: 0.1\ndelta: 0.1\ncategories:\n  refund: {alpha: 0.01}\n", "refund"),
}


@pytest.mark.parametrize("kind", BAD_RULES)
def test_a_bad_rule_set_is_refused_at_the_start_with_file_line_and_reason(tmp_path: Path, kind: str) -> None:
    text, said = BAD_RULES[kind]
    (tmp_path / "categories.yaml").write_text(CATEGORIES, encoding="utf-8")
    (tmp_path / "rules.yaml").write_text(text, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROUTER_")}
    command = [str(COMMAND), "run", "--rules", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("ticket-router: ")
    assert f"{tmp_path}/rules.yaml" in line
    assert said in line
