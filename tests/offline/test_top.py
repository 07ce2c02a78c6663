"""`ticket-router top`: what a screen says is what the workers' metrics say, whatever answers there."""

from __future__ import annotations

import fcntl
import http.server
import io
import math
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from worker.errors import ConfigError, InvalidAnswer
from worker.offline.metrics_page import Page, read_page
from worker.offline.top import Look, Screen, quantile, screen
from worker.telemetry import (
    CACHE_LOOKUPS,
    CALIBRATION_IN_FORCE,
    CERTIFIED,
    DECISIONS,
    ENGINE_ENDPOINT_UP,
    ENGINE_LATENCY,
    ENGINE_REQUESTS,
    IN_FLIGHT,
    INFO,
    LAG,
    MODE,
    OLDEST_AGE,
    SETTLED,
    Metrics,
)
from worker.top import UNREACHABLE, render, watch

COMMAND = Path(sys.executable).with_name("ticket-router")


def _worker() -> Metrics:
    metrics = Metrics()
    metrics.watch(INFO, lambda: 1, "helpdesk", "3", "abcdef0123456789")
    metrics.watch(CALIBRATION_IN_FORCE, lambda: 1, "")
    metrics.watch(CERTIFIED, lambda: 1, "billing")
    metrics.watch(CERTIFIED, lambda: 0, "login")
    metrics.watch(MODE, lambda: 1, "billing", "auto")
    metrics.watch(MODE, lambda: 0, "billing", "shadow")
    metrics.watch(MODE, lambda: 1, "login", "shadow")
    metrics.watch(LAG, lambda: 40)
    metrics.watch(IN_FLIGHT, lambda: 7)
    metrics.watch(OLDEST_AGE, lambda: 3.25)
    metrics.watch(ENGINE_ENDPOINT_UP, lambda: 1, "engine-1")
    metrics.watch(ENGINE_ENDPOINT_UP, lambda: 0, "engine-2")
    return metrics


def _work(metrics: Metrics, tickets: int) -> None:
    metrics.add(SETTLED, by=2 * tickets)
    metrics.add(DECISIONS, "route", "billing", "certified", by=tickets)
    for number, reason in enumerate(("margin", "uncertain", "too_long", "other_order", "over_quota", "rare")):
        metrics.add(DECISIONS, "escalate", "billing", reason, by=tickets / (number + 1))
    metrics.add(ENGINE_REQUESTS, "answered", by=tickets)
    for _ in range(tickets):
        metrics.observe(ENGINE_LATENCY, 0.2)


def _look(metrics: Metrics, at: float, url: str = "http://a:8080") -> Look:
    return Look(url, "ready", read_page(metrics.prometheus(), at))


def _plain(found: Screen, width: int = 100) -> str:
    out = Console(width=width, color_system=None, record=True, file=io.StringIO())
    out.print(render(found))
    return out.export_text()


class TestScreen:
    def test_rates_are_those_of_the_last_interval_summed_over_the_workers(self) -> None:
        one, other = _worker(), _worker()
        _work(one, 1_000)
        before = [_look(one, 10.0), _look(other, 10.0, "http://b:8080")]
        _work(one, 10)
        _work(other, 20)
        found = screen(before, [_look(one, 12.0), _look(other, 12.0, "http://b:8080")])
        assert (found.settled.per_s, found.settled.total) == (30.0, 2_060.0)
        assert next((flow.what, flow.per_s) for flow in found.actions) == (("escalate",), pytest.approx(36.75))
        assert found.categories[1].what == ("route", "billing")
        assert found.categories[1].per_s == 15.0
        assert [flow.what for flow in found.escalations] == [
            ("margin",),
            ("uncertain",),
            ("too_long",),
            ("other_order",),
            ("over_quota",),
        ]
        assert [worker.settled_per_s for worker in found.workers] == [10.0, 20.0]

    def test_a_gauge_breaker_and_certificate_stand_with_their_worker(self) -> None:
        (line,) = screen([], [_look(_worker(), 1.0)]).workers
        assert (line.lag, line.in_flight, line.oldest_s, line.partitions) == (40, 7, 3.25, None)
        assert line.breakers == (("engine-1", True), ("engine-2", False))
        assert (line.certified, line.is_calibrated, line.runs) == ((1, 2), True, "helpdesk 3")
        assert line.modes == (("auto", 1), ("shadow", 1))
        uncalibrated = Metrics()
        uncalibrated.watch(INFO, lambda: 1, "helpdesk", "3", "")
        uncalibrated.watch(CALIBRATION_IN_FORCE, lambda: 0, "model_changed")
        (line,) = screen([], [_look(uncalibrated, 1.0)]).workers
        assert (line.is_calibrated, line.calibration) == (False, "model_changed")

    def test_a_worker_that_began_anew_is_no_negative_rate(self) -> None:
        old, new = _worker(), _worker()
        _work(old, 1_000)
        _work(new, 10)
        found = screen([_look(old, 1.0)], [_look(new, 2.0)])
        assert found.settled.per_s == 20.0
        assert found.engine.p50 == pytest.approx(0.175)
        slow = _worker()
        for _ in range(2_000):
            slow.observe(ENGINE_LATENCY, 20.0)
        assert screen([_look(old, 1.0)], [_look(slow, 2.0)]).engine.p50 == 20.0

    def test_at_the_first_look_and_for_a_worker_that_was_away_no_rate_is_known(self) -> None:
        metrics = _worker()
        _work(metrics, 5)
        assert screen([], [_look(metrics, 1.0)]).settled.per_s is None
        away = Look("http://a:8080", "unreachable: no")
        found = screen([away], [_look(metrics, 2.0)])
        assert (found.settled.per_s, found.settled.total) == (None, 10)
        gone = screen([_look(metrics, 1.0)], [away])
        assert (gone.workers[0].reachable, gone.workers[0].readiness) == (False, "unreachable: no")

    def test_the_share_of_cache_hits_is_that_of_the_interval(self) -> None:
        metrics, hits = _worker(), {"memory": 1_000.0, "misses": 0.0}
        metrics.watch(CACHE_LOOKUPS, lambda: hits["memory"], "memory_hits")
        metrics.watch(CACHE_LOOKUPS, lambda: hits["misses"], "misses")
        before = _look(metrics, 1.0)
        assert screen([before], [_look(metrics, 2.0)]).cache_hits is None
        hits.update(memory=1_003.0, misses=1.0)
        assert screen([before], [_look(metrics, 2.0)]).cache_hits == 0.75

    def test_cache_hits_of_before_the_first_look_are_shown_as_since_start(self) -> None:
        metrics = _worker()
        metrics.watch(CACHE_LOOKUPS, lambda: 3, "memory_hits")
        metrics.watch(CACHE_LOOKUPS, lambda: 1, "misses")
        found = screen([_look(metrics, 1.0)], [_look(metrics, 2.0)])
        assert (found.cache_hits, found.cache_hits_since_start) == (None, 0.75)
        (row,) = (line for line in _plain(found).splitlines() if "cache hits" in line)
        assert row.split()[-2:] == ["-", "75.0%"]

    def test_where_no_worker_answers_no_table_stands_but_how_to_start_one(self) -> None:
        away = Look("http://127.0.0.1:8080", "unreachable: refused")
        told = _plain(screen([away], [away]))
        assert "unreachable: refused" in told and "`ticket-router run --rules FOLDER` starts one" in told
        assert "ROUTER_HTTP_PORT" in told and "since start" not in told

    @pytest.mark.parametrize(
        ("counts", "share", "expected"),
        [
            ((0, 10, 10), 0.5, 1.5),
            ((10, 10, 10), 0.95, 0.95),
            ((0, 0, 4), 0.5, math.inf),
            ((5, 10, 10), 0.5, 1.0),
            ((0, 0, 0), 0.5, None),
        ],
    )
    def test_quantiles_are_those_of_prometheus(self, counts: tuple[int, ...], share: float, expected: float) -> None:
        assert quantile(tuple(zip((1.0, 2.0, math.inf), counts, strict=True)), share) == expected


class TestPage:
    def test_every_metric_of_a_worker_is_read_back_as_it_was(self) -> None:
        metrics = _worker()
        metrics.add(DECISIONS, "route", 'a"b\\c}d', "certified", by=3)
        page = read_page(metrics.prometheus(), 1.0)
        assert page.value(DECISIONS, "route", 'a"b\\c}d', "certified") == 3
        assert page.value(SETTLED) == 0
        assert page.buckets[ENGINE_LATENCY][-1] == (math.inf, 0)

    @pytest.mark.parametrize("text", ["", "<html>ticket_router</html>", "up 1\n", "# TYPE ticket_router_lag gauge\n"])
    def test_what_is_no_workers_page_is_refused(self, text: str) -> None:
        with pytest.raises(InvalidAnswer, match="no worker"):
            read_page(text, 1.0)

    def test_values_that_are_no_numbers_are_left_out(self) -> None:
        text = "".join(f"ticket_router_lag {value}\n" for value in ("NaN", "+Inf", "1e999", "x", ""))
        assert read_page(f"{text}ticket_router_in_flight 3\n", 1.0) == Page(1.0, {IN_FLIGHT: {(): 3.0}}, {})

    def test_no_character_that_a_terminal_obeys_reaches_the_screen(self) -> None:
        evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e\u0000[bold]"
        text = (
            f'ticket_router_info{{rule_set="{evil}",version="{evil}",calibration="{evil}"}} 1\n'
            f'ticket_router_decisions_total{{action="{evil}",category="{evil}",reason="{evil}"}} 1\n'
            f'ticket_router_engine_endpoint_up{{endpoint="{evil}"}} 0\n'
            f'ticket_router_engine_requests_total{{outcome="{evil}\\n"}} 1\n'
            f'ticket_router_calibration_in_force{{reason="{evil}"}} 0\n'
        )
        shown = _plain(screen([], [Look("http://a", "ready", read_page(text, 1.0))]))
        assert "[bold]" in shown, "and what looks like markup is none"
        assert shown.replace("\n", "").isprintable()

    @given(st.text(max_size=200))
    def test_garbage_never_breaks_the_reader(self, garbage: str) -> None:
        page = read_page(f"ticket_router_lag 1\n{garbage}\nticket_router_x{{{garbage}}} 1\n", 1.0)
        assert _plain(screen([], [Look("http://a", "ready", page)])).replace("\n", "").isprintable()

    def test_a_page_without_end_is_read_to_a_limit(self) -> None:
        lines = "".join(f'ticket_router_dead_letters_total{{code="{n}"}} 1\n' for n in range(30_000))
        page = read_page(lines, 1.0)
        assert sum(len(series) for series in page.values.values()) == 20_000

    @pytest.mark.parametrize("width", [10, 20, 40, 300])
    def test_any_width_will_do(self, width: int) -> None:
        metrics = _worker()
        _work(metrics, 5)
        shown = _plain(screen([_look(metrics, 1.0)], [_look(metrics, 2.0)]), width)
        assert all(len(line.rstrip()) <= width for line in shown.splitlines())


@contextmanager
def _serving(answers: Mapping[str, tuple[int, bytes]]) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, b"nothing here"))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class TestWatch:
    async def test_a_worker_that_goes_away_is_shown_so_and_the_others_go_on(self) -> None:
        metrics = _worker()
        answers = {"/metrics": (200, metrics.prometheus().encode()), "/readyz": (503, b"not ready: lag\x1b[2J\n")}
        gone: dict[str, tuple[int, bytes]] = dict(answers)
        out = Console(width=100, color_system=None, record=True, file=io.StringIO())

        async def sleep(_: float) -> None:
            gone["/metrics"] = (500, b"")

        with _serving(answers) as well, _serving(gone) as ill:
            code = await watch([well, ill, "http://127.0.0.1:9"], out, once=True, every_s=1.0, sleep=sleep)
        shown = out.export_text()
        assert code == UNREACHABLE
        assert "not ready: lag?[2J" in shown
        assert "HTTP 500 on /metrics" in shown
        assert "unreachable: cannot connect" in shown
        assert "2 of 3 workers do not answer" in shown

    @pytest.mark.parametrize("body", [b"<html>", b"\xff\x00" * 100, b"up 1\n"])
    async def test_an_address_where_something_else_answers_is_an_error(self, body: bytes) -> None:
        with _serving({"/metrics": (200, body)}) as url, pytest.raises(ConfigError, match="no worker's metrics page"):
            await watch([url], Console(quiet=True), once=True, every_s=0.0)

    @pytest.mark.parametrize("url", ["localhost:8080", "ftp://a", "http://", "http://user:word@a:1", "http://a\x1b:1"])
    async def test_what_is_no_address_is_refused(self, url: str) -> None:
        with pytest.raises(ConfigError, match="URL of the worker"):
            await watch([url], Console(quiet=True), once=True, every_s=0.0)

    def test_the_command_prints_one_plain_screen_into_a_pipe(self) -> None:
        metrics = _worker()
        _work(metrics, 5)
        with _serving({"/metrics": (200, metrics.prometheus().encode()), "/readyz": (200, b"ready\n")}) as url:
            done = subprocess.run(
                [str(COMMAND), "top", "--url", url, "--every", "0.2"], capture_output=True, timeout=120, check=False
            )
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.decode().replace("\n", "").isprintable()
        assert b"engine-2 OPEN" in done.stdout

    @pytest.mark.parametrize("size", [(40, 120), (3, 12)])
    def test_on_a_terminal_it_goes_on_until_it_is_interrupted(self, size: tuple[int, int]) -> None:
        metrics, asked = _worker(), threading.Semaphore(0)
        shown, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        page = {"/metrics": (200, metrics.prometheus().encode()), "/readyz": (200, b"ready\n")}
        seen = bytearray()

        def read() -> None:
            try:
                while found := os.read(shown, 65_536):
                    seen.extend(found)
                    asked.release()
            except OSError:  # nobody writes any more
                pass

        with _serving(page) as url:
            environment = {**os.environ, "TERM": "xterm"}
            # What a shell starts in the background ignores the signal, and so do its children.
            heeding = ["env", "--default-signal=INT"]
            command = [*heeding, str(COMMAND), "top", "--url", url, "--every", "0.2"]
            process = subprocess.Popen(command, stdout=end, stderr=end, env=environment)
            os.close(end)
            reader = threading.Thread(target=read, daemon=True)
            reader.start()
            try:
                while seen.count(b"ticket-route") < 3:
                    assert asked.acquire(timeout=60), bytes(seen)
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 0, bytes(seen)
            finally:
                process.kill()
                reader.join(10)
                os.close(shown)
        assert bytes(seen).rstrip().endswith(b"\x1b[?25h\x1b[?1049l"), "cursor and screen are back"
