"""Traces: a traced ticket shows its whole way, in the trace of whoever sent it, and on in what is made of it."""

from __future__ import annotations

import asyncio
import http.server
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from tests.runtime.desks import RULES, broker, make_worker, send
from tests.runtime.engines import ScriptedEngine
from tests.servers.otlp_collector import OtlpCollector, said
from tests.waiting import until
from worker.adapters.http_exchange import HttpExchange, Server
from worker.adapters.memory import MemoryBroker, MemoryStream
from worker.core.scores import LabelScores, ScoreRequest
from worker.errors import EngineUnavailable
from worker.runtime.batcher import Batcher
from worker.runtime.loop import Limits, Worker
from worker.runtime.service import running
from worker.telemetry import SPANS_LOST, TRACES_REFUSED, Metrics, start_export, traceparent, within
from worker.telemetry.export import Export

TRACE = "0af7651916cd43dd8448eb211c80319c"
SENT = "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SENT}-01".encode()


def _export(
    url: str, ratio: float = 0.0, followed_per_s: float = 1e4, metrics: Metrics | None = None, **more: str
) -> Export:
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "OTEL_TRACES_SAMPLER_ARG": str(ratio),
        "OTEL_METRICS_EXPORTER": "none",
        **more,
    }
    return start_export(
        environ,
        metrics or Metrics(),
        resource={},
        clock=time.monotonic,
        chance=lambda: 0.5,
        followed_per_s=followed_per_s,
    )


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpCollector]:
    with OtlpCollector() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)  # the SDK's exporter reads it itself
        yield found


@pytest.fixture
def traced(collector: OtlpCollector) -> Iterator[Export]:
    export = _export(collector.url)
    yield export
    export.close(1.0)


async def _settle(worker: Worker, count: int) -> None:
    async with running(worker):
        await until(lambda: worker.status().settled == count)


def _found(collector: OtlpCollector, export: Export) -> dict[str, list[Any]]:
    """Spans by name."""
    export.close(10.0)
    found: dict[str, list[Any]] = defaultdict(list)
    for span in collector.spans():
        found[span.name].append(span)
    return found


def _ticket(on: MemoryBroker, text: str = "label 1", *headers: tuple[str, bytes | None]) -> None:
    on.produce(RULES.input_topic, b"k", orjson.dumps({"id": text, "text": text}), headers)


async def test_a_ticket_shows_its_way_below_the_span_that_sent_it(collector: OtlpCollector, traced: Export) -> None:
    on = broker(partitions=1)
    headers = (("traceparent", PARENT), ("tracestate", b"shop=1"), ("baggage", b"user=7"), ("source", b"mail"))
    _ticket(on, "label 1", *headers)
    await _settle(make_worker(on, ScriptedEngine(), tracing=traced.tracing), 1)
    found = _found(collector, traced)
    assert set(found) == {"consume", "cache", "score", "batch", "decide", "publish"}
    (consume,) = found["consume"]
    assert (consume.trace_id.hex(), consume.parent_span_id.hex(), consume.kind) == (TRACE, SENT, 5)
    assert [link.span_id.hex() for link in consume.links] == [SENT]
    assert consume.trace_state == "shop=1"
    about = said(consume)
    assert about.pop("decision_id")
    assert about == {
        "messaging.system": "kafka",
        "messaging.operation.type": "process",
        "messaging.destination.name": RULES.input_topic,
        "messaging.destination.partition.id": "0",
        "messaging.kafka.offset": 0,
        "action": "route",
        "category": "login",
        "reason": "certified",
        "cached": False,
    }
    for name in ("cache", "score", "decide", "publish"):
        (span,) = found[name]
        assert (span.trace_id, span.parent_span_id) == (consume.trace_id, consume.span_id), name
        assert consume.start_time_unix_nano <= span.start_time_unix_nano + 10_000_000, name
        assert span.end_time_unix_nano <= consume.end_time_unix_nano, name
    assert said(found["cache"][0]) == {"cached": False}
    assert not any(b"label 1" in body for _, body in collector.bodies), "no ticket text leaves"
    goes_on = f"00-{TRACE}-{consume.span_id.hex()}-01".encode()
    (routed,) = on.records("desk.login")
    (decision,) = on.records("desk.decisions")
    assert dict(routed.headers) | {"source": b"mail", "baggage": b"user=7"} == dict(routed.headers)
    for record in (routed, decision):
        assert [value for name, value in record.headers if name == "traceparent"] == [goes_on]
        assert dict(record.headers)["tracestate"] == b"shop=1"
    assert "baggage" not in dict(decision.headers)


async def test_a_request_to_the_engine_is_linked_with_every_traced_ticket_in_it_both_ways(
    collector: OtlpCollector, traced: Export
) -> None:
    on = broker(partitions=1)
    for n in range(8):
        _ticket(on, f"label {n % 3} {n}", *((("traceparent", PARENT),) if n % 2 else ()))
    await _settle(make_worker(on, ScriptedEngine(), tracing=traced.tracing), 8)
    found = _found(collector, traced)
    scores = {span.span_id: span for span in found["score"]}
    assert len(scores) == 4
    linked = {link.span_id: batch for batch in found["batch"] for link in batch.links}
    assert set(linked) == set(scores)
    for span_id, batch in linked.items():
        assert batch.span_id in {link.span_id for link in scores[span_id].links}
        assert batch.trace_id.hex() != TRACE
        assert (batch.kind, said(batch)["endpoint"]) == (3, "one")
    assert sum(said(batch)["items"] for batch in found["batch"]) == 8
    assert sum(said(batch)["traced"] for batch in found["batch"]) == 4


async def test_what_is_not_traced_passes_its_trace_on_unchanged_and_makes_no_span(
    collector: OtlpCollector, traced: Export
) -> None:
    on = broker(partitions=1)
    unsampled = PARENT[:-1] + b"0"
    _ticket(on, "label 1", ("traceparent", unsampled), ("tracestate", b"shop=1"), ("baggage", b"user=7"))
    on.produce(RULES.input_topic, b"k", b"no ticket", (("traceparent", unsampled),))
    _ticket(on, "label 1 again")
    await _settle(make_worker(on, ScriptedEngine(), tracing=traced.tracing), 3)
    assert _found(collector, traced) == {}
    first, second = on.records("desk.login")
    assert first.headers[:3] == (("traceparent", unsampled), ("tracestate", b"shop=1"), ("baggage", b"user=7"))
    assert "traceparent" not in dict(second.headers)
    (dead,) = on.records("desk.dead-letter")
    assert dict(dead.headers)["traceparent"] == unsampled


async def test_dead_letters_and_what_takes_the_place_of_refused_outputs_go_on_in_the_trace(
    collector: OtlpCollector, traced: Export
) -> None:
    on = broker(partitions=1)
    on.refuse("desk.login", "TOPIC_AUTHORIZATION_FAILED")
    on.produce(RULES.input_topic, b"k", b"no ticket", (("traceparent", PARENT),))
    _ticket(on, "label 1", ("traceparent", PARENT))
    await _settle(make_worker(on, ScriptedEngine(), tracing=traced.tracing), 2)
    found = _found(collector, traced)
    by_offset = {said(span)["messaging.kafka.offset"]: span for span in found["consume"]}
    for offset, topic in ((0, "desk.dead-letter"), (1, "desk.human")):
        (record,) = on.records(topic)
        assert dict(record.headers)["traceparent"] == f"00-{TRACE}-{by_offset[offset].span_id.hex()}-01".encode()
    assert said(by_offset[0])["action"] == "dead_letter"
    refused = [span for span in found["publish"] if span.status.message == "NotCommitted"]
    assert [span.parent_span_id for span in refused] == [by_offset[1].span_id]


async def test_every_attempt_to_publish_shows(collector: OtlpCollector, traced: Export) -> None:
    on = broker(partitions=1)
    on.fail_commits(2)
    _ticket(on, "label 1", ("traceparent", PARENT))
    await _settle(make_worker(on, ScriptedEngine(), tracing=traced.tracing), 1)
    found = _found(collector, traced)
    assert [span.status.message for span in found["publish"]] == ["StreamRetriable", "StreamRetriable", ""]
    assert len(found["consume"]) == 1


async def test_a_ticket_that_is_delivered_again_gets_a_second_span_in_the_same_trace(
    collector: OtlpCollector, traced: Export
) -> None:
    on = broker(partitions=1)
    stuck = ScriptedEngine(delay_s=1.0)
    _ticket(on, "label 1", ("traceparent", PARENT))
    stream = MemoryStream(on, RULES.input_topic)
    first = make_worker(on, stuck, tracing=traced.tracing, stream=stream)
    async with running(first):
        await until(lambda: len(stuck.calls) == 1)
        on.expel(stream)
        await until(lambda: first.status().settled == 1)
    found = _found(collector, traced)
    gone, done = sorted(found["consume"], key=lambda span: span.start_time_unix_nano)
    assert (gone.status.message, done.status.message) == ("PartitionGone", "")
    assert {span.trace_id.hex() for span in (gone, done)} == {TRACE}
    (batch,) = found["batch"]
    scores = {span.span_id for span in found["score"]}
    assert len(scores) == 2
    assert {link.span_id for link in batch.links} == scores, "who comes to wait later is linked as well"
    (routed,) = on.records("desk.login")
    assert done.span_id.hex().encode() in (dict(routed.headers)["traceparent"] or b"")


async def test_what_is_settled_while_its_partition_leaves_shows_as_published(
    collector: OtlpCollector, traced: Export
) -> None:
    on = broker(partitions=2)
    for key in (b"a", b"b", b"c", b"d", b"e", b"f"):
        on.produce(RULES.input_topic, key, orjson.dumps({"text": f"label 1 {key!r}"}), (("traceparent", PARENT),))
    late = Limits(settle_interval_s=600.0, drain_s=0.1, revoke_s=5.0)
    engine = ScriptedEngine()
    first = make_worker(on, engine, tracing=traced.tracing, limits=late)
    second = make_worker(on, ScriptedEngine(), tracing=traced.tracing)
    async with running(first):
        await until(lambda: sum(map(len, engine.calls)) == 6)
        async with running(second):
            await until(lambda: first.status().assigned == second.status().assigned == 1)
    found = _found(collector, traced)
    assert len(found["publish"]) == len(found["consume"]) == 6
    assert {span.status.message for span in found["consume"]} == {""}


async def test_an_engine_that_fails_shows_in_the_batch_and_each_retry_in_one_of_its_own(
    collector: OtlpCollector, traced: Export
) -> None:
    fails = iter([EngineUnavailable("secret words of the server")])

    def script(_: Sequence[ScoreRequest]) -> None:
        for error in fails:
            raise error

    on = broker(partitions=1)
    _ticket(on, "label 1", ("traceparent", PARENT))
    await _settle(make_worker(on, ScriptedEngine(script), tracing=traced.tracing), 1)
    found = _found(collector, traced)
    assert [span.status.message for span in found["batch"]] == ["EngineUnavailable", ""]
    (score,) = found["score"]
    assert {link.span_id for link in score.links} == {span.span_id for span in found["batch"]}
    assert not any(b"secret" in body for _, body in collector.bodies)


async def test_more_than_a_few_tickets_a_second_cannot_have_themselves_traced(
    collector: OtlpCollector,
) -> None:
    metrics = Metrics()
    export = _export(collector.url, followed_per_s=2.0, metrics=metrics)
    on = broker(partitions=1)
    for n in range(50):
        _ticket(on, f"label 1 {n}", ("traceparent", PARENT))
    await _settle(make_worker(on, ScriptedEngine(), tracing=export.tracing), 50)
    assert 2 <= len(_found(collector, export)["consume"]) < 50
    (refused,) = metrics.samples(TRACES_REFUSED)
    assert refused.value >= 1


async def test_a_collector_that_is_away_costs_spans_and_no_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    metrics = Metrics()
    export = _export("http://127.0.0.1:9", ratio=1.0, metrics=metrics)
    on = broker()
    send(on, 200)
    await _settle(make_worker(on, ScriptedEngine(), tracing=export.tracing), 200)
    export.close(0.2)
    (lost,) = metrics.samples(SPANS_LOST)
    assert lost.value >= 200


async def test_spans_that_the_queue_has_no_room_for_are_counted_as_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every span is either with the collector or counted, while it takes its time as well as when it does not."""
    exported, goes_on = 0, threading.Event()

    def slowly(_: OTLPSpanExporter, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        nonlocal exported
        goes_on.wait(60)
        exported += len(spans)
        return SpanExportResult.SUCCESS

    monkeypatch.setattr(OTLPSpanExporter, "export", slowly)
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
    metrics = Metrics()
    export = _export("http://127.0.0.1:9", ratio=1.0, metrics=metrics, OTEL_BSP_MAX_QUEUE_SIZE="20")
    for _ in range(300):
        span = export.tracing.begin(())
        assert span is not None
        span.end()
    (lost,) = metrics.samples(SPANS_LOST)
    assert 300 - 30 <= lost.value <= 300 - 20
    goes_on.set()
    export.close(60)
    (lost,) = metrics.samples(SPANS_LOST)
    assert exported + lost.value == 300
    assert "Queue full" not in caplog.text


async def test_a_request_that_follows_a_traced_one_is_not_about_its_ticket(traced: Export) -> None:
    asked: list[tuple[str, str | None]] = []

    async def ask(requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        asked.extend((request.item, traceparent()) for request in requests)
        await asyncio.sleep(0.01)
        return [LabelScores.from_logprobs((-0.1, -3.0)) for _ in requests]

    batcher = Batcher(ask, max_items=1, max_wait_s=0.0, concurrency=1)

    async def score(item: str) -> None:
        await batcher.score(ScoreRequest("p", item, (1, 2)))

    span = traced.tracing.begin((("traceparent", PARENT),))
    with within(span):
        first = asyncio.create_task(score("traced"))
    second = asyncio.create_task(score("not traced"))
    await asyncio.gather(first, second)
    assert [(item, trace is not None) for item, trace in asked] == [("traced", True), ("not traced", False)]


class _Engine(ScriptedEngine):
    """Asks a server over HTTP, too."""

    def __init__(self, url: str) -> None:
        super().__init__()
        server = Server("the server", "", "")
        self._http = HttpExchange(url, server, api_key=None, connections=4, connect_timeout_s=5.0)

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        await self._http.ask("POST", "/v1/score", b"{}", 1_000, 10.0)
        return await super().score(requests)

    async def aclose(self) -> None:
        await self._http.aclose()


async def test_the_engine_gets_the_trace_of_the_request_and_none_where_no_ticket_is_traced(
    collector: OtlpCollector, traced: Export
) -> None:
    asked: list[str | None] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            asked.append(self.headers.get("traceparent"))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        on = broker(partitions=1)
        engine = _Engine(f"http://127.0.0.1:{server.server_address[1]}")
        worker = make_worker(on, engine, tracing=traced.tracing)
        async with running(worker):
            _ticket(on, "label 1 traced", ("traceparent", PARENT))
            await until(lambda: worker.status().settled == 1)
            _ticket(on, "label 1 not traced")
            await until(lambda: worker.status().settled == 2)
        await engine.aclose()
        await asyncio.to_thread(server.shutdown)
    (batch,) = _found(collector, traced)["batch"]
    first, second = asked
    assert (first or "").startswith(f"00-{batch.trace_id.hex()}-{batch.span_id.hex()}-0")
    assert second is None
