"""Telemetry: it never blocks, never raises, and never tells what is in a ticket."""

from __future__ import annotations

import ast
import fcntl
import io
import json
import logging
import os
import pty
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.servers.otlp_collector import OtlpCollector
from worker.errors import ConfigError, StreamRetriable
from worker.telemetry import (
    CACHE_LOOKUPS,
    DECISIONS,
    ENGINE_LATENCY,
    LAG,
    METRICS,
    Attribute,
    Event,
    LogSink,
    Metrics,
    Sampling,
    describe_metrics,
    get_logger,
    set_up_logging,
    start_export,
)
from worker.telemetry.names import BUCKETS_S, prometheus_name
from worker.telemetry.spans import OpenTelemetrySpans
from worker.telemetry.traces import Followed, SampledTracing, Span, carried, parent_in, passed_on, state_in

ROOT = Path(__file__).parents[1]
NOW = 1_790_000_000.25
PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + b"0"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Logging as it was: set-up is for the whole process."""
    root = logging.getLogger()
    handlers, level, raising = root.handlers[:], root.level, logging.raiseExceptions
    structured = structlog.get_config()
    yield
    structlog.configure(**structured)
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.raiseExceptions = raising
    logging.captureWarnings(False)


def _notice(count: int) -> bytes:
    return b'{"dropped": %d}\n' % count


def _drain(fd: int) -> bytes:
    """Everything that is in a pipe now."""
    read = b""
    while select.select([fd], [], [], 0.2)[0] and (piece := os.read(fd, 1 << 20)):
        read += piece
    return read


@pytest.fixture(params=["own description", "polled"])
def pipe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """Both ways of writing to a pipe: with a second open of it, and where that is refused."""
    reader, writer = os.pipe()
    if request.param == "polled":
        monkeypatch.setattr(os, "open", _refused)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def _refused(*_: object, **__: object) -> int:
    raise PermissionError


class TestLogSink:
    def test_a_pipe_that_nobody_reads_costs_lines_and_no_time(self, pipe: tuple[int, int]) -> None:
        reader, writer = pipe
        sink = LogSink(writer, _notice)
        lines = [b'{"number": %d, "padding": "%s"}\n' % (number, b"x" * (number % 300)) for number in range(5_000)]
        for line in lines:
            sink.write(line)
        assert sink.dropped > 1_000
        written = _drain(reader).splitlines(keepends=True)
        assert written[:-1] == lines[: len(written) - 1], "whole lines, in order"
        assert len(written) + sink.dropped in (len(lines), len(lines) + 1)

    def test_what_was_dropped_is_said_once_there_is_room(self, pipe: tuple[int, int]) -> None:
        reader, writer = pipe
        sink = LogSink(writer, _notice)
        for _ in range(3_000):
            sink.write(b'{"padding": "%s"}\n' % (b"x" * 100))
        dropped = sink.dropped
        first = _drain(reader)
        sink.write(b'{"after": 1}\n')
        sink.write(b'{"after": 2}\n')
        lines = (first + _drain(reader)).splitlines()
        assert [json.loads(line) for line in lines[-3:]] == [{"dropped": dropped}, {"after": 1}, {"after": 2}]
        assert all(json.loads(line) for line in lines), "no line is torn"

    def test_lines_longer_than_a_pipe_takes_at_once_stay_whole(self, pipe: tuple[int, int]) -> None:
        reader, writer = pipe
        sink = LogSink(writer, _notice)
        read, lines = b"", 0
        for number in range(60):
            sink.write(b'{"number": %d, "padding": "%s"}\n' % (number, b"x" * 30_000))
            if number % 7 == 0:
                read += os.read(reader, 20_000)
        read += _drain(reader)
        for _ in range(3):
            sink.write(b"{}\n")
            read += _drain(reader)
        for line in read.splitlines():
            json.loads(line)
            lines += 1
        assert lines > 10
        assert read.endswith(b"\n")

    def test_the_flags_of_a_shared_descriptor_stay_as_they_are(self, pipe: tuple[int, int]) -> None:
        _, writer = pipe
        before = fcntl.fcntl(writer, fcntl.F_GETFL)
        LogSink(writer, _notice).write(b"line\n")
        assert fcntl.fcntl(writer, fcntl.F_GETFL) == before

    def test_a_reader_that_has_gone_costs_lines_only(self) -> None:
        reader, writer = os.pipe()
        sink = LogSink(writer, _notice)
        os.close(reader)
        for _ in range(10):
            sink.write(b"line\n")
        os.close(writer)
        assert sink.dropped == 10

    def test_a_named_pipe_without_a_reader_costs_lines_only(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        holder = os.open(tmp_path / "fifo", os.O_RDWR)
        sink = LogSink(holder, _notice)
        for _ in range(2_000):
            sink.write(b"x" * 99 + b"\n")
        os.close(holder)
        assert sink.dropped > 1_000

    def test_a_full_disk_costs_lines_only(self) -> None:
        full = os.open("/dev/full", os.O_WRONLY)
        sink = LogSink(full, _notice)
        for _ in range(10):
            sink.write(b"line\n")
        os.close(full)
        assert sink.dropped == 10

    def test_a_file_is_appended_to(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        path.write_bytes(b"before\n")
        with path.open("ab") as file:
            LogSink(file.fileno(), _notice).write(b"line\n")
        assert path.read_bytes() == b"before\nline\n"

    def test_a_redirected_file_is_not_overwritten(self, tmp_path: Path) -> None:
        with (tmp_path / "log").open("wb") as file:
            os.write(file.fileno(), b"before\n")
            LogSink(file.fileno(), _notice).write(b"line\n")
        assert (tmp_path / "log").read_bytes() == b"before\nline\n"

    def test_a_socket_that_nobody_reads_costs_lines_and_no_time(self) -> None:
        left, right = socket.socketpair()
        with left, right:
            sink = LogSink(right.fileno(), _notice)
            for _ in range(20_000):
                sink.write(b"x" * 99 + b"\n")
            assert sink.dropped > 1_000
            assert left.recv(100) == b"x" * 99 + b"\n"
            assert right.getblocking()

    def test_a_stopped_terminal_costs_lines_and_no_time(self) -> None:
        master, slave = pty.openpty()
        sink = LogSink(slave, _notice)
        for _ in range(5_000):
            sink.write(b"x" * 99 + b"\n")
        os.close(slave)
        os.close(master)
        assert sink.dropped > 1_000

    def test_threads_do_not_tear_each_others_lines(self, pipe: tuple[int, int]) -> None:
        reader, writer = pipe
        sink = LogSink(writer, _notice)

        def write_many(line: bytes) -> None:
            for _ in range(200):
                sink.write(line)

        whole = {name * 700 for name in (b"a", b"b", b"c")}
        threads = [threading.Thread(target=write_many, args=(line + b"\n",)) for line in whole]
        read = b""
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            read += _drain(reader)
        read += _drain(reader)
        assert {line for line in read.splitlines() if not line.startswith(b"{")} <= whole

    def test_gathered_lines_are_written_together_and_no_more_than_a_pipe_takes_as_one(
        self, pipe: tuple[int, int]
    ) -> None:
        reader, writer = pipe
        sink = LogSink(writer, _notice)
        due: list[Callable[[], None]] = []
        sink.gather(due.append)
        sizes: list[int] = []
        write_some = sink._write_some
        sink._write_some = lambda data: sizes.append(len(data)) or write_some(data)  # type: ignore[func-returns-value]
        lines = [b"%03d" % number + b"x" * 96 + b"\n" for number in range(100)]
        for line in lines:
            sink.write_soon(line)
        assert len(sizes) == 2, "what is more than a pipe takes as one does not wait"
        assert len(due) == 3
        for each in due:
            each()
        assert _drain(reader) == b"".join(lines)
        assert len(sizes) == 3
        assert max(sizes) <= select.PIPE_BUF

    @pytest.mark.timeout(20)
    def test_what_logs_in_the_middle_of_a_write_neither_hangs_nor_gets_lost(self, pipe: tuple[int, int]) -> None:
        """As a finaliser may, wherever the collector of cycles sets in."""
        reader, writer = pipe
        sink = LogSink(writer, _notice)

        def soon(_: Callable[[], None]) -> None:
            sink.write(b"by a finaliser\n")
            sink.write_soon(b"by another\n")

        sink.gather(soon)
        sink.write_soon(b"1\n")
        sink.write(b"2\n")
        assert _drain(reader) == b"1\nby a finaliser\nby another\n2\n"

    def test_no_line_overtakes_those_that_are_gathered(self, pipe: tuple[int, int]) -> None:
        reader, writer = pipe
        sink = LogSink(writer, _notice)
        sink.gather(lambda _: None)
        sink.write_soon(b"1\n")
        sink.write(b"2\n")
        sink.write_soon(b"3\n")
        other = threading.Thread(target=sink.write_soon, args=(b"4\n",))
        other.start()
        other.join()
        assert _drain(reader) == b"1\n2\n3\n4\n", "nor waits on a thread whose lines are not gathered"
        sink.write_soon(b"5\n")
        assert _drain(reader) == b""
        sink.gather_no_more()
        sink.write_soon(b"6\n")
        assert _drain(reader) == b"5\n6\n"

    @given(
        room=st.lists(st.integers(0, 200), max_size=80),
        lengths=st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=80),
    )
    def test_however_little_fits_at_a_time_lines_are_whole_and_all_accounted_for(
        self, room: list[int], lengths: list[tuple[int, bool]]
    ) -> None:
        out = io.BytesIO()
        rooms = iter(room)

        def write_some(data: bytes) -> int:
            taken = data[: next(rooms, 10_000)]
            out.write(taken)
            return len(taken)

        sink = LogSink(1, _notice)
        sink._write_some = write_some
        sink.gather(lambda _: None)
        lines = [b"%02d" % (number % 100) + b"x" * length + b"\n" for number, (length, _) in enumerate(lengths)]
        for line, (_, at_once) in zip(lines, lengths, strict=True):
            (sink.write if at_once else sink.write_soon)(line)
        rooms = iter(())
        for _ in range(2):
            sink.write(b"last\n")
        written = out.getvalue().splitlines(keepends=True)
        told = sum(json.loads(line)["dropped"] for line in written if line.startswith(b"{"))
        whole = [line for line in written if not line.startswith(b"{")]
        assert set(whole) <= {*lines, b"last\n"}
        assert whole[-2:] == [b"last\n", b"last\n"]
        assert told == sink.dropped
        assert len(whole) + sink.dropped == len(lines) + 2


@pytest.fixture
def logged() -> Iterator[Callable[..., Callable[[], list[dict[str, Any]]]]]:
    """Sets logging up, and gives the lines so far."""
    reader, writer = os.pipe()

    def start(**more: Any) -> Callable[[], list[dict[str, Any]]]:
        options: dict[str, Any] = {"level": "info", "form": "json", "fd": writer, "clock": lambda: NOW, **more}
        set_up_logging(**options)
        return lambda: [json.loads(line) for line in _drain(reader).splitlines()]

    yield start
    os.close(reader)
    os.close(writer)


class TestLogs:
    def test_a_line_is_one_json_object_with_time_level_and_event(self, logged: Any) -> None:
        lines = logged()
        get_logger().info(Event.DECIDED, action="route", category="billing", total_ms=1.5)
        (line,) = lines()
        assert list(line) == ["time", "level", "event", "action", "category", "total_ms"]
        assert line["time"] == "2026-09-21T14:13:20.250Z"
        assert (line["level"], line["event"], line["total_ms"]) == ("info", "ticket.decided", 1.5)

    def test_fields_may_be_named_by_attribute(self, logged: Any) -> None:
        lines = logged()
        get_logger().info(Event.DECIDED, **{Attribute.CATEGORY: "billing", Attribute.COUNT: 3})
        (line,) = lines()
        assert (line["category"], line["count"]) == ("billing", 3)

    def test_below_the_level_nothing_is_written(self, logged: Any) -> None:
        lines = logged(level="warning")
        get_logger().info(Event.DECIDED)
        get_logger().warning(Event.ENGINE_DOWN)
        assert [line["event"] for line in lines()] == ["engine.down"]

    def test_a_strangers_error_is_told_without_its_words_and_ours_with_them(self, logged: Any) -> None:
        lines = logged()
        for error in (ValueError("ticket says: my card is 4111"), StreamRetriable("no broker answered")):
            try:
                raise error
            except (ValueError, StreamRetriable):
                get_logger().exception(Event.FAILED)
        strange, ours = lines()
        assert strange["error"] == "ValueError"
        assert "4111" not in json.dumps(strange)
        assert "test_telemetry.py" in strange["trace"][-1]
        assert strange["level"] == "error"
        assert ours["detail"] == "no broker answered"

    @pytest.mark.parametrize(
        "value", ["\ud800", 1 << 80, b"ticket text", object(), {1: 2}, float("nan"), "\x1b[31m\r\n"]
    )
    def test_no_value_fails_or_leaks(self, logged: Any, value: object) -> None:
        lines = logged()
        get_logger().info(Event.DECIDED, detail=value)
        (line,) = lines()
        assert "ticket text" not in json.dumps(line)

    @pytest.mark.parametrize("form", ["json", "console"])
    def test_no_value_can_forge_a_line_or_move_the_cursor(self, form: str) -> None:
        reader, writer = os.pipe()
        set_up_logging(level="info", form=form, fd=writer, clock=lambda: NOW)  # type: ignore[arg-type]
        get_logger().info(Event.DECIDED, detail='x\r\n{"event": "forged"}\x1b[2J\u202e\u2028', error=b"\x1b")
        written = _drain(reader)
        os.close(reader)
        os.close(writer)
        assert written.count(b"\n") == 1
        assert not set(written[:-1]) & {*range(32), 127}

    def test_libraries_are_heard_from_warning_on_without_the_words_of_their_errors(self, logged: Any) -> None:
        lines = logged(level="debug")
        log = logging.getLogger("some.library")
        log.info("chatter")
        log.warning("trouble with %s", "a thing")
        try:
            raise ValueError("my card is 4111")
        except ValueError:
            log.exception("failed")
        log.warning("wrong %d", "arguments")
        said = lines()
        assert [(line["library"], line["detail"]) for line in said] == [
            ("some.library", "trouble with a thing"),
            ("some.library", "failed"),
            ("some.library", "wrong %d"),
        ]
        assert said[1]["error"] == "ValueError"
        assert "4111" not in json.dumps(said)

    @pytest.mark.parametrize("sink", ["pipe", "/dev/full"])
    def test_a_process_whose_log_is_stuck_goes_on_and_ends(self, sink: str) -> None:
        program = (
            "import time; from worker.telemetry import *\n"
            "sink = set_up_logging(level='info', form='json', fd=2, clock=time.time)\n"
            "for n in range(20_000): get_logger().info(Event.DECIDED, category='billing', count=n)\n"
            "print(sink.dropped)"
        )
        command = [sys.executable, "-c", program]
        if sink == "pipe":
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
        else:
            with Path(sink).open("wb") as full:
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=full, cwd=ROOT)
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 60)[0], "it never got there"
        said = process.stdout.readline()  # nobody reads standard error in the meantime
        assert process.wait(60) == 0
        process.stdout.close()
        if process.stderr is not None:
            process.stderr.close()
        assert int(said) > 10_000


class TestNames:
    def test_every_log_call_uses_a_declared_event_and_declared_attributes(self) -> None:
        declared = {value for name, value in vars(Attribute).items() if name.isupper()} | {"exc_info"}
        for path in sorted((ROOT / "worker").rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                owner = ast.unparse(node.func.value)
                if node.func.attr in _LOG_METHODS and re.fullmatch(r"(self\.)?_?log(ger)?", owner):
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    assert node.args, where
                    assert ast.unparse(node.args[0]).startswith("Event."), f"{where}: the event is no Event"
                    used = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                    assert used <= declared, f"{where}: {used - declared} are in no Attribute"

    def test_metric_names_are_distinct_and_the_page_lists_them(self) -> None:
        assert len({metric.name for metric in METRICS}) == len(METRICS)
        assert len({prometheus_name(metric) for metric in METRICS}) == len(METRICS)
        page = (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8")
        assert describe_metrics() in page, "write the table anew with worker.telemetry.describe_metrics()"


_LOG_METHODS = {"debug", "info", "warning", "error", "exception"}


class TestMetrics:
    def test_counts_add_up_per_label_values(self) -> None:
        metrics = Metrics()
        metrics.add(DECISIONS, "route", "billing", "certified")
        metrics.add(DECISIONS, "route", "billing", "certified", by=2)
        metrics.add(DECISIONS, "escalate", "", "too_long")
        assert [(dict(sample.labels)["reason"], sample.value) for sample in metrics.samples(DECISIONS)] == [
            ("certified", 3),
            ("too_long", 1),
        ]

    def test_what_others_count_is_read_when_asked(self) -> None:
        metrics, hits, lag = Metrics(), {"hits": 1}, [None, 7]
        metrics.watch(CACHE_LOOKUPS, lambda: hits["hits"], "hits")
        metrics.watch(LAG, lambda: lag[0])
        assert [sample.value for sample in metrics.samples(CACHE_LOOKUPS)] == [1]
        assert list(metrics.samples(LAG)) == []
        hits["hits"], lag[0] = 5, lag[1]
        assert [sample.value for sample in metrics.samples(CACHE_LOOKUPS)] == [5]
        assert [sample.value for sample in metrics.samples(LAG)] == [7]

    def test_the_prometheus_page_can_be_read_back(self) -> None:
        metrics = Metrics()
        metrics.add(DECISIONS, "route", 'a"b\\c\nd', "certified", by=1_234_567_890_123)
        for seconds in (0.001, 0.005, 0.3, 1e9):
            metrics.observe(ENGINE_LATENCY, seconds)
        page = metrics.prometheus()
        assert r'category="a\"b\\c\nd"' in page
        assert "} 1234567890123\n" in page
        name = prometheus_name(ENGINE_LATENCY)
        assert f'{name}_bucket{{le="0.005"}} 2\n' in page
        assert f'{name}_bucket{{le="0.5"}} 3\n' in page
        assert f'{name}_bucket{{le="+Inf"}} 4\n' in page
        assert f"{name}_count 4\n" in page
        form = re.compile(r"(# (HELP|TYPE) .*|[a-z_]+(\{([a-z_]+=\"(\\.|[^\"\\])*\",?)+\})? [-+0-9.eE]+)")
        for line in page.splitlines():
            assert form.fullmatch(line), line

    def test_every_bucket_bound_is_inclusive(self) -> None:
        metrics = Metrics()
        for bound in BUCKETS_S:
            metrics.observe(ENGINE_LATENCY, bound)
        assert metrics.histograms[ENGINE_LATENCY].counts == [*[1] * len(BUCKETS_S), 0]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bytes]]]:
    with OtlpCollector() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        yield server.bodies


def _start(metrics: Metrics | None = None, chance: float = 0.5) -> Any:
    return start_export(
        os.environ,
        metrics or Metrics(),
        resource={"service.name": "ticket-router"},
        clock=time.monotonic,
        chance=lambda: chance,
    )


class TestExport:
    @pytest.mark.parametrize(
        "environ",
        [
            {},
            {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"},
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
                "OTEL_TRACES_EXPORTER": "none",
                "OTEL_METRICS_EXPORTER": "none",
            },
        ],
    )
    def test_without_the_standard_variables_nothing_is_started(self, environ: dict[str, str]) -> None:
        before = threading.active_count()
        export = start_export(environ, Metrics(), resource={}, clock=time.monotonic, chance=lambda: 0.0)
        assert export.tracing.begin((("traceparent", PARENT),)) is None
        assert threading.active_count() == before
        export.close(1.0)

    def test_spans_and_metrics_reach_the_collector(
        self, collector: list[tuple[str, bytes]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The decision is made once, before the span: the SDK, which reads these variables too, must not make it again.
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.000001")
        metrics = Metrics()
        metrics.add(DECISIONS, "route", "billing", "certified", by=3)
        export = _start(metrics, chance=0.0)
        metrics.observe(ENGINE_LATENCY, 0.2)
        span = export.tracing.begin((("traceparent", UNSAMPLED),))
        span.set(Attribute.CATEGORY, "billing")
        span.fail(ValueError("my card is 4111"))
        span.end()
        export.close(10.0)
        found = dict(collector)
        assert b"4111" not in found["/v1/traces"]
        request = ExportTraceServiceRequest.FromString(found["/v1/traces"])
        (sent,) = request.resource_spans[0].scope_spans[0].spans
        assert (sent.name, sent.trace_id.hex()) == ("consume", PARENT.split(b"-")[1].decode())
        assert sent.parent_span_id.hex() == PARENT.split(b"-")[2].decode()
        assert sent.status.message == "ValueError"
        measured = ExportMetricsServiceRequest.FromString(found["/v1/metrics"])
        by_name = {metric.name: metric for metric in measured.resource_metrics[0].scope_metrics[0].metrics}
        assert by_name[DECISIONS.name].sum.data_points[0].as_int == 3
        point = by_name[ENGINE_LATENCY.name].histogram.data_points[0]
        assert (point.count, point.sum, tuple(point.explicit_bounds)) == (1, 0.2, BUCKETS_S)
        assert point.bucket_counts[BUCKETS_S.index(0.25)] == 1
        assert 0 < point.start_time_unix_nano <= point.time_unix_nano

    @pytest.mark.parametrize(("preference", "counts"), [("cumulative", [1, 3]), ("delta", [1, 2])])
    def test_histograms_are_cumulative_or_deltas_as_the_standard_variable_says(
        self, collector: list[tuple[str, bytes]], monkeypatch: pytest.MonkeyPatch, preference: str, counts: list[int]
    ) -> None:
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", preference)
        metrics = Metrics()
        metrics.add(DECISIONS, "route", "billing", "certified")
        export = _start(metrics)
        metrics.observe(ENGINE_LATENCY, 0.2)
        export._metrics.force_flush()
        for _ in range(2):
            metrics.observe(ENGINE_LATENCY, 0.2)
        export.close(10.0)
        found = []
        for _, body in collector:
            for metric in ExportMetricsServiceRequest.FromString(body).resource_metrics[0].scope_metrics[0].metrics:
                if metric.name == ENGINE_LATENCY.name:
                    found.append(metric.histogram.data_points[0].count)
        assert found == counts

    @pytest.mark.parametrize("fault", ["silent", "closed"])
    def test_a_collector_that_is_away_neither_blocks_nor_holds_up_the_end(
        self, monkeypatch: pytest.MonkeyPatch, fault: str
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
            monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
            monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "50")
            if fault == "closed":
                listener.close()
            export = _start()
            start = time.monotonic()
            for _ in range(5_000):
                export.tracing.begin(()).end()
            export.close(0.5)
            assert time.monotonic() - start < 20.0  # the SDK would go on with forty batches, 2 s each


def _tracing(sampling: Sampling, chance: float, followed: Followed | None = None) -> SampledTracing:
    from opentelemetry.sdk.trace import TracerProvider

    start = OpenTelemetrySpans(TracerProvider(shutdown_on_exit=False).get_tracer("test")).consume
    return SampledTracing(start, sampling, lambda: chance, followed or Followed(1e6, time.monotonic))


class TestSampling:
    @pytest.mark.parametrize(
        ("environ", "expected"),
        [
            ({}, Sampling(0.01)),
            ({"OTEL_TRACES_SAMPLER": "always_on"}, Sampling(1.0, follow_parent=False)),
            ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, Sampling(0.0)),
            (
                {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.2"},
                Sampling(0.2, follow_parent=False),
            ),
            ({"OTEL_TRACES_SAMPLER_ARG": "0.2"}, Sampling(0.2)),
        ],
    )
    def test_the_standard_variables_are_understood(self, environ: dict[str, str], expected: Sampling) -> None:
        assert Sampling.from_environment(environ) == expected

    @pytest.mark.parametrize("environ", [{"OTEL_TRACES_SAMPLER": "x"}, {"OTEL_TRACES_SAMPLER_ARG": "2"}])
    def test_others_are_refused(self, environ: dict[str, str]) -> None:
        with pytest.raises(ConfigError, match="OTEL_TRACES_SAMPLER"):
            Sampling.from_environment(environ)

    @pytest.mark.parametrize(
        ("parent", "chance", "follow_parent", "sampled"),
        [
            (PARENT, 0.99, True, True),
            (UNSAMPLED, 0.0, True, False),
            (PARENT, 0.99, False, False),
            (UNSAMPLED, 0.0, False, True),
            (None, 0.49, True, True),
            (None, 0.5, True, False),
            (b"garbage", 0.49, True, True),
            (UNSAMPLED + b"zz", 0.49, True, True),
            (b"\xff" * 55, 0.49, True, True),
            (b"", 0.5, True, False),
        ],
    )
    def test_the_parent_decides_else_chance(
        self, parent: bytes | None, chance: float, follow_parent: bool, sampled: bool
    ) -> None:
        tracing = _tracing(Sampling(0.5, follow_parent), chance)
        assert (tracing.begin((("x", None), ("traceparent", parent))) is not None) == sampled

    def test_messages_that_ask_to_be_traced_are_followed_so_many_a_second_and_then_left_to_chance(self) -> None:
        now = [100.0]
        followed = Followed(3.0, lambda: now[0])
        tracing = _tracing(Sampling(0.5), 0.99, followed)
        asked = (("traceparent", PARENT),)

        def traced() -> int:
            return sum(tracing.begin(asked) is not None for _ in range(50))

        assert (traced(), followed.refused) == (3, 47)
        now[0] += 0.34
        assert traced() == 1
        now[0] += 1_000
        assert traced() == 3, "what was not used is not saved up"
        lucky = _tracing(Sampling(0.5), 0.49, Followed(0.0, lambda: now[0]))
        assert lucky.begin(asked) is not None, "chance decides, as about everybody else"

    def test_the_trace_goes_on_in_what_is_made_of_the_ticket(self) -> None:
        span = _tracing(Sampling(1.0), 0.0).begin(
            (("traceparent", PARENT), ("tracestate", b"vendor=1"), ("source", b"mail"))
        )
        assert span is not None
        headers = carried((("source", b"mail"), ("traceparent", PARENT), ("source", None)), span)
        assert headers[:2] == (("source", b"mail"), ("source", None))
        made = dict(headers[2:])
        assert made["tracestate"] == b"vendor=1"
        version, trace, parent, flags = (made["traceparent"] or b"").split(b"-")
        assert (version, trace, flags) == (b"00", PARENT.split(b"-")[1], b"01")
        assert parent != PARENT.split(b"-")[2], "the ticket's own span is the parent now"


HOSTILE: list[tuple[tuple[str, bytes | None], ...]] = [
    (("traceparent", None),),
    (("traceparent", b"\xff\x00" * 500_000),),
    (("traceparent", PARENT + b"-" + b"x" * 1_000_000),),
    (("traceparent", b"ff" + PARENT[2:]),),
    (("traceparent", PARENT + b"-more"),),
    (("traceparent", b"00-" + b"0" * 32 + PARENT[35:]),),
    (("traceparent", PARENT[:36] + b"0" * 16 + b"-01"),),
    (("traceparent", PARENT.upper()),),
    (("traceparent", PARENT), ("tracestate", b"a=" + b"x" * 1_000_000)),
    (("traceparent", PARENT), ("tracestate", b"a=1,\x1b[2J=2")),
    (("traceparent", PARENT), ("tracestate", b"a=1,a=2")),
    (("traceparent", PARENT), ("tracestate", b"a=1," * 100)),
    (("traceparent", PARENT), ("tracestate", b",".join(b"a%d=" % n + b"x" * 200 for n in range(32)))),
    *[(("traceparent", PARENT),) * 10_000],
]


class TestHostileHeaders:
    @pytest.mark.parametrize("headers", HOSTILE)
    def test_whatever_a_message_brings_is_traced_or_not_and_passed_on_within_bounds(
        self, headers: tuple[tuple[str, bytes | None], ...], logged: Callable[..., Callable[[], list[dict[str, Any]]]]
    ) -> None:
        lines = logged()
        span = _tracing(Sampling(1.0), 0.0).begin(headers)
        assert span is not None
        made = carried(headers, span)
        assert sum(name == "traceparent" for name, _ in made) == 1
        assert sum(len(value or b"") for _, value in (*made, *passed_on(headers))) < 1_500
        assert lines() == [], "what a stranger wrote is not logged"

    def test_the_last_of_several_counts_as_for_other_clients_of_kafka(self) -> None:
        second = PARENT.replace(b"b7ad", b"aaaa")
        headers = (("traceparent", PARENT), ("tracestate", b"a=1"), ("traceparent", second), ("tracestate", b"b=2"))
        parent = parent_in(headers)
        assert parent is not None
        assert f"{parent.span_id:x}".startswith("aaaa")
        assert state_in(headers) == (("b", "2"),)
        assert passed_on((*headers, ("baggage", b"user=1"))) == (("traceparent", second), ("tracestate", b"b=2"))

    def test_nothing_is_passed_on_of_what_is_no_trace_context(self) -> None:
        assert passed_on((("traceparent", b"garbage"), ("tracestate", b"a=1"))) == ()
        for state in (b"a=1,a=2", b"a", b"A=1", b"a=\xff"):
            assert passed_on((("traceparent", PARENT), ("tracestate", state))) == (("traceparent", PARENT),)

    def test_a_span_that_has_ended_takes_what_comes_late_in_silence(
        self, logged: Callable[..., Callable[[], list[dict[str, Any]]]]
    ) -> None:
        lines = logged()
        span: Span | None = _tracing(Sampling(1.0), 0.0).begin(())
        assert span is not None
        span.end()
        span.end()
        span.set(Attribute.REASON, "late")
        span.fail(ValueError())
        assert span.context() == ()
        assert lines() == []
