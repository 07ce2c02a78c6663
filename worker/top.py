"""`ticket-router top`: how workers that run look on a terminal, second by second."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from worker.adapters.worker_page import WorkerPages
from worker.core.printable import printable
from worker.errors import ConfigError, EngineError, InvalidAnswer
from worker.offline.metrics_page import read_page
from worker.offline.top import Flow, Latency, Look, Screen, WorkerLine, screen
from worker.runtime.load import under_load

LOCAL: Final = "http://127.0.0.1:8080"
MOST_AT_ONCE: Final = 16
TIMEOUT_S: Final = 2.0
UNREACHABLE: Final = 1
"""Exit code of `--once` where a worker does not answer."""
READINESS_CHARACTERS: Final = 160
NO_WORKER: Final = (
    "No worker answers. `ticket-router run --rules FOLDER` starts one; of one that runs, name the health port "
    f"(ROUTER_HTTP_PORT) by --url, such as --url {LOCAL}"
)

Urls = Annotated[
    list[str], typer.Option("--url", help="Health port of a worker; repeat it for several.", show_default=True)
]
Once = Annotated[bool, typer.Option("--once", help="Look twice, print one plain screen, end.")]
Every = Annotated[float, typer.Option("--every", min=0.2, max=60.0, help="Seconds between two looks.")]


def command(url: Urls = [LOCAL], once: Once = False, every: Every = 1.0) -> None:  # noqa: B006 - typer copies it
    """Watch running workers: rates, decisions, cache, engine, lag, certificates. `--once` prints one screen."""
    out = Console(color_system=None) if once else Console()
    if len(set(url)) < len(url):
        raise ConfigError("a --url stands twice: its tickets would count twice")
    try:
        code = asyncio.run(watch(url, out, once=once or not out.is_terminal, every_s=every))
    except KeyboardInterrupt:
        code = 0
    raise typer.Exit(code)


async def watch(
    urls: Sequence[str],
    out: Console,
    *,
    once: bool,
    every_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> int:
    """The exit code; without `once` it goes on until it is cancelled. Raises ConfigError on an address where something
    else than a worker answers at the first look."""
    workers = [WorkerPages(url, TIMEOUT_S) for url in urls]
    try:
        before = await _looks(workers, clock)
        for look in before:
            if look.is_foreign:
                raise ConfigError(f"{look.look.url}: {look.look.readiness}; name the health port of a worker")
        if once:
            await sleep(every_s)
            now = await _looks(workers, clock)
            found = screen([each.look for each in before], [each.look for each in now])
            out.print(render(found))
            return 0 if all(worker.reachable for worker in found.workers) else UNREACHABLE
        shown = screen([], [each.look for each in before])
        with Live(render(shown), console=out, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            live.refresh()
            while True:
                await sleep(every_s)
                now = await _looks(workers, clock)
                live.update(render(screen([each.look for each in before], [each.look for each in now])), refresh=True)
                before = now
    finally:
        for worker in workers:
            await worker.aclose()


@dataclass(frozen=True, slots=True)
class _Looked:
    look: Look
    is_foreign: bool = False
    """Something answers there, and it is no worker."""


async def _looks(workers: Sequence[WorkerPages], clock: Callable[[], float]) -> list[_Looked]:
    """At all of them at once: one that is away must not hold up the others."""
    work = [partial(_look, worker, clock) for worker in workers]
    return [timed.done for timed in await under_load(work, MOST_AT_ONCE, clock, lambda *_: None)]


async def _look(worker: WorkerPages, clock: Callable[[], float]) -> _Looked:
    try:
        text = await worker.metrics()
        page = read_page(text, clock())
        readiness = printable(await worker.readiness())[:READINESS_CHARACTERS]
    except EngineError as error:
        is_foreign = isinstance(error, InvalidAnswer)
        said = str(error) if is_foreign else f"unreachable: {error}"
        return _Looked(Look(printable(worker.url), printable(said)), is_foreign)
    return _Looked(Look(printable(worker.url), readiness, page))


# -- what it looks like. Whatever a worker said is Text, which is no markup -------------------------------------------


def render(found: Screen) -> RenderableType:
    """Everything on one screen, the most urgent first."""
    if not any(worker.reachable for worker in found.workers):
        return Group(_states(found.workers), Text(NO_WORKER))
    return Group(
        _headline(found),
        _workers(found.workers),
        _states(found.workers),
        Text(),
        _side_by_side(
            _flows("decisions", found.actions),
            _flows("escalated because", found.escalations),
        ),
        Text(),
        _side_by_side(_flows("by category", found.categories), _engine(found)),
    )


def _headline(found: Screen) -> Text:
    lost = sum(not worker.reachable for worker in found.workers)
    text = Text.assemble(
        ("ticket-router  ", "bold"),
        f"{_rate(found.settled.per_s)} tickets/s settled, {found.settled.total:,.0f} since start",
    )
    if found.dead_letters.total:
        text.append(f", {_rate(found.dead_letters.per_s)} dead letters/s ({found.dead_letters.total:,.0f})", "yellow")
    if lost:
        text.append(f", {lost} of {len(found.workers)} workers do not answer", "red")
    return text


def _workers(workers: Sequence[WorkerLine]) -> Table:
    table = _table("worker", "tickets/s", "partitions", "lag", "in flight", "oldest")
    for worker in workers:
        table.add_row(
            _name(worker),
            _rate(worker.settled_per_s),
            _count(worker.partitions),
            _count(worker.lag),
            _count(worker.in_flight),
            _seconds(worker.oldest_s),
        )
    return table


def _states(workers: Sequence[WorkerLine]) -> Group:
    """A sentence for each worker, as long as it has to be."""
    lines = []
    for worker in workers:
        style = "green" if worker.readiness == "ready" else "yellow" if worker.reachable else "red"
        line = Text.assemble(_name(worker), "  ", (worker.readiness, style))
        if worker.reachable:
            line = Text.assemble(line, "; engine: ", _breakers(worker), "; certified: ", _certificate(worker))
        lines.append(line)
    return Group(*lines)


def _name(worker: WorkerLine) -> Text:
    return Text(worker.url.removeprefix("http://"))


def _breakers(worker: WorkerLine) -> Text:
    text = Text()
    for name, up in worker.breakers:
        text.append(f"{', ' if text else ''}{name} {'closed' if up else 'OPEN'}", "" if up else "red")
    return text or Text("-")


def _certificate(worker: WorkerLine) -> Text:
    if not worker.reachable or not worker.runs:
        return Text("-")
    if not worker.is_calibrated:
        return Text(f"none: {worker.calibration or 'not known'} ({worker.runs})", "yellow")
    sure, of = worker.certified
    modes = ", ".join(f"{count} {mode}" for mode, count in worker.modes)
    about = f"{worker.runs}, {worker.calibration[:8]}{', modes: ' if modes else ''}{modes}"
    return Text(f"{sure} of {of} ({about})", "" if sure else "yellow")


def _flows(title: str, flows: Sequence[Flow]) -> Table:
    table = _table(title, "/s", "since start")
    for flow in flows:
        table.add_row(Text(" ".join(flow.what)), _rate(flow.per_s), f"{flow.total:,.0f}")
    if not flows:
        table.add_row("none yet", "-", "-")
    return table


def _engine(found: Screen) -> Table:
    table = _table("engine and cache", "", "")
    table.add_row("cache hits, since start", _percent(found.cache_hits), _percent(found.cache_hits_since_start))
    table.add_row("engine request p50, p95", *_latency(found.engine))
    table.add_row("ticket p50, p95", *_latency(found.tickets))
    for flow in found.engine_requests:
        style = "" if flow.what == ("answered",) or not flow.per_s else "red"
        what = Text(f"requests {' '.join(flow.what)}", style)
        table.add_row(what, f"{_rate(flow.per_s)}/s", f"{flow.total:,.0f}")
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    table.add_column(first, overflow="ellipsis", no_wrap=True)
    for other in others:
        table.add_column(other, justify="right", no_wrap=True)
    return table


def _side_by_side(left: Table, right: Table) -> Table:
    table = Table.grid(padding=(0, 4))
    table.add_row(left, right)
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _rate(per_s: float | None) -> str:
    if per_s is None:
        return "-"
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.1f}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _latency(latency: Latency) -> tuple[str, str]:
    return _seconds(latency.p50), _seconds(latency.p95)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if math.isinf(value):
        return "> 1 min"
    if value < 1:
        return f"{value * 1000:,.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:,.0f} min" if value < 7200 else f"{value / 3600:,.0f} h"
