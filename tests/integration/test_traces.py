"""A worker process on real Kafka: a ticket's trace comes in with its headers, goes on in its outputs, harming none."""

from __future__ import annotations

import subprocess

import orjson
import pytest

from tests.integration.desk import COMMAND, LABELS, Desk
from tests.servers.otlp_collector import OtlpCollector, said
from tests.waiting import wait_for
from worker.adapters.topic_log import TopicWriter
from worker.ports import Headers, Output

pytestmark = pytest.mark.kafka

TRACE, SENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SENT}-01".encode()
HUGE = b"a=" + b"x" * 800_000


def test_a_ticket_with_a_trace_shows_whole_and_hostile_headers_harm_no_ticket(desk: Desk) -> None:
    with OtlpCollector() as collector:
        desk.environment |= {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_METRICS_EXPORTER": "none"}
        headers: dict[str, Headers] = {
            "traced": (("traceparent", PARENT), ("tracestate", b"shop=1"), ("baggage", b"user=7")),
            "huge-state": (("traceparent", PARENT), ("tracestate", HUGE)),
            "huge-parent": (("traceparent", PARENT + b"-" + HUGE),),
            "broken": (("traceparent", b"\xff\x00\x1b[2J"), ("traceparent", None), ("tracestate", b"\xff")),
            "many": (("traceparent", PARENT),) * 1_000,
        }
        writer = TopicWriter(desk.bootstrap_servers, {"message.max.bytes": 1_000_000})
        for n, (ticket_id, sent) in enumerate(headers.items()):
            body = orjson.dumps({"id": ticket_id, "text": f"{ticket_id}: trouble with {LABELS[n % 3]}"})
            writer.write(Output(desk.rules.input_topic, b"k", body, sent))
        writer.flush(60)
        with desk.worker(trace_followed_per_s=1_000) as worker:
            found = desk.wait_for_all(list(headers))
            wait_for(
                lambda: sum(span.name == "consume" for span in collector.spans()) >= 3, "the spans of traced tickets"
            )
            url = f"http://127.0.0.1:{worker.port}"
            top = subprocess.run(
                [str(COMMAND), "top", "--once", "--url", url], capture_output=True, timeout=60, check=True
            )
            assert worker.terminate() == 0, worker.tail()
        log = worker.log.read_text(errors="replace")
        spans = collector.spans()
    assert all(len(topics) == 1 for topics in found.values())
    assert "\x1b" not in log
    assert "xxxxxxxx" not in log
    # The ticket's whole tree, each at least once, below who sent it.
    consumed = {said(span)["messaging.kafka.offset"]: span for span in spans if span.name == "consume"}
    consume = consumed[0]
    assert (consume.trace_id.hex(), consume.parent_span_id.hex()) == (TRACE, SENT)
    below = [span.name for span in spans if span.parent_span_id == consume.span_id]
    assert sorted(set(below)) == ["cache", "decide", "publish", "score"]
    linked = {link.span_id for span in spans if span.name == "batch" for link in span.links}
    assert {span.span_id for span in spans if span.name == "score"} <= linked
    goes_on = f"00-{TRACE}-{consume.span_id.hex()}-01".encode()
    traces = {}
    for record in desk.records(*desk.rules.output_topics):
        if record.partition.topic == desk.rules.decisions_topic:
            ticket_id = orjson.loads(record.value or b"")["ticket_id"]
            assert sum(len(value or b"") for _, value in record.headers) < 1_000, ticket_id
        else:
            ticket_id = orjson.loads(record.value or b"")["id"]
        traces[ticket_id, record.partition.topic] = [v for name, v in record.headers if name == "traceparent"]
    assert [value for (ticket_id, _), value in traces.items() if ticket_id == "traced"] == [[goes_on]] * 2
    assert f"{len(headers)} since start" in top.stdout.decode()
    assert b"ready" in top.stdout
