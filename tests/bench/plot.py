"""The picture of a run: a panel for each part that has something to show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.bench.report import Results

GREY, BLUE = "#888888", "#3465a4"

Panel = Callable[[Any], None]
"""Draws on a matplotlib Axes."""


def draw(results: Results, path: Path, costs: Sequence[tuple[str, float]]) -> None:
    """Writes a PNG; nothing where there is nothing. `costs` are names and CPU microseconds a ticket."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    panels = [(panel, rows) for panel, rows in _panels(results, costs) if rows]
    if not panels:
        return
    heights = [0.3 * rows + 0.9 for _, rows in panels]
    figure, all_axes = pyplot.subplots(
        len(panels), figsize=(9, sum(heights) + 0.5), height_ratios=heights, layout="constrained", squeeze=False
    )
    for (panel, _), axes in zip(panels, all_axes[:, 0], strict=True):
        panel(axes)
    figure.suptitle(f"{results.conditions()['machine']}, {results.began:%Y-%m-%d}", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panels(results: Results, costs: Sequence[tuple[str, float]]) -> list[tuple[Panel, int]]:
    """Each with how many rows it needs."""
    cache = [(f"(d) {row.name}", row.cpu_us) for row in results.cache]
    return [
        (_bars(costs, "CPU microseconds a ticket"), len(costs)),
        (_bars(cache, "CPU microseconds a look-up"), len(cache)),
        (_rates(results), 9 if results.engine else 0),
        (_latencies(results), 9 if results.slow else 0),
        (_memory(results), 9 if results.memory else 0),
    ]


def _bars(rows: Sequence[tuple[str, float]], unit: str) -> Panel:
    def panel(axes: Any) -> None:
        names, values = [name for name, _ in rows], [value for _, value in rows]
        drawn = axes.barh(names, values, color=[GREY if "plain" in name else BLUE for name in names])
        axes.bar_label(drawn, fmt="%.0f", padding=3)
        axes.set_xscale("log")
        axes.margins(x=0.15)
        axes.set_xlabel(unit)
        axes.invert_yaxis()

    return panel


def _rates(results: Results) -> Panel:
    def panel(axes: Any) -> None:
        for way in dict.fromkeys(row.way for row in results.engine):
            rows = [row for row in results.engine if row.way == way]
            axes.plot([row.concurrency for row in rows], [row.per_second for row in rows], marker="o", label=way)
        axes.set_xscale("log", base=2)
        axes.set_xlabel(f"(e) tickets at once, {results.engine_name}")
        axes.set_ylabel("tickets/s")
        axes.set_ylim(bottom=0)
        axes.legend()

    return panel


def _latencies(results: Results) -> Panel:
    def panel(axes: Any) -> None:
        assert results.slow is not None
        names = [phase.name for phase in results.slow.phases]
        axes.bar(names, [phase.call_p99_ms for phase in results.slow.phases], width=0.4, color=BLUE)
        axes.axhline(2 * results.slow.target_ms, color=GREY, linestyle="--", label="twice the latency target")
        axes.set_ylabel("p99 of calls, ms")
        axes.legend()

    return panel


def _memory(results: Results) -> Panel:
    def panel(axes: Any) -> None:
        for grown in results.memory:
            name = "scored" if grown.scored else "by rule"
            axes.plot([done for done, _ in grown.curve], [mib for _, mib in grown.curve], label=name)
        axes.set_xlabel("tickets")
        axes.set_ylabel("resident MiB")
        axes.set_ylim(bottom=0)
        axes.legend()

    return panel
