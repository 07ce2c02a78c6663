"""Figures: how the measures look. Each is drawn once, as SVG for the page and as PNG for everything else."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from worker.core.binomial import clopper_pearson_upper
from worker.core.certificates import Certificate
from worker.core.reliability import Band

INK, MUTED, GRID, PAPER = "#1f2a37", "#64748b", "#e6eaf0", "#ffffff"
GOOD, BAD, LIMIT, PALE = "#0f766e", "#c2410c", "#b45309", "#94a3b8"
SHADES = LinearSegmentedColormap.from_list("teal", ["#ffffff", "#cfe6e2", "#5fa9a0", "#0f5f58"])
PNG_DPI = 160
MANY_CATEGORIES = 24
"""Above it a confusion matrix carries no numbers."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One figure. `alt` says in a sentence what it shows."""

    name: str
    alt: str
    svg: bytes
    png: bytes


def reliability_figure(before: Sequence[Band], after: Sequence[Band]) -> Drawn:
    """Stated probability against the share that was right, in ten bands, with 95 % intervals and counts."""

    def draw(figure: Figure) -> None:
        top, low = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [4, 1], "hspace": 0.08})
        top.plot([0, 1], [0, 1], color=PALE, linewidth=1, linestyle=(0, (4, 3)))
        for found, colour, name, shift in ((before, PALE, "raw scores", -0.006), (after, GOOD, "calibrated", 0.006)):
            filled = [band for band in found if band.n]
            if not filled:
                continue
            x = np.array([band.mean_confidence for band in filled]) + shift
            y = np.array([band.accuracy for band in filled])
            spread = np.array([[b.accuracy - b.lower for b in filled], [b.upper - b.accuracy for b in filled]])
            top.errorbar(x, y, yerr=spread, fmt="none", ecolor=colour, elinewidth=1.2, alpha=0.75)
            sizes = [18 + 90 * math.sqrt(band.n / max(b.n for b in found)) for band in filled]
            top.scatter(
                x, y, s=sizes, color=colour, edgecolor=PAPER, linewidth=0.8, zorder=3, label=name, clip_on=False
            )
        top.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="share that was right")
        top.legend(loc="upper left", markerscale=0.7)
        width = 0.042
        for found, colour, shift in ((before, PALE, -width / 2), (after, GOOD, width / 2)):
            middles = [(band.lo + band.hi) / 2 + shift for band in found]
            low.bar(middles, [band.n for band in found], width=width, color=colour)
        low.set(xlabel="stated probability", ylabel="tickets")
        low.yaxis.set_major_locator(MaxNLocator(2, integer=True))
        for axes in (top, low):
            axes.xaxis.set_major_formatter(PercentFormatter(1, 0))
        top.yaxis.set_major_formatter(PercentFormatter(1, 0))

    return drawn("reliability", "Stated probability against the share of answers that were right.", (5.4, 5.0), draw)


def risk_coverage_figure(
    curve: Sequence[tuple[float, float]], alpha: float, point: tuple[float, float] | None, *, per_ticket: bool
) -> Drawn:
    """(share of all tickets routed, errors) strict to loose, and what the certificates route together. Errors are a
    share of the routed, or with `per_ticket` of all tickets.
    """

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        x, y = [p[0] for p in curve], [p[1] for p in curve]
        axes.fill_between(x, y, color=GOOD, alpha=0.08, linewidth=0)
        axes.plot(x, y, color=GOOD, linewidth=1.8, label="errors in these labels")
        axes.axhline(alpha, color=LIMIT, linewidth=1.2, linestyle=(0, (5, 3)))
        axes.text(0.008, alpha, f"alpha {100 * alpha:.3g}%", color=LIMIT, va="bottom", ha="left", fontsize=8.5)
        top = max(2.2 * alpha, 1.1 * max(y[len(y) // 20 :], default=0.0), 0.02)
        if point is not None:
            axes.scatter(*point, s=80, color=INK, zorder=4, edgecolor=PAPER, linewidth=1.2, label="what is certified")
            right = point[0] > 0.6
            axes.annotate(
                f"{point[0]:.0%} routed, {point[1]:.1%} {'misrouted' if per_ticket else 'of them wrong'}",
                point,
                xytext=(-10 if right else 10, -16 if point[1] > 0.3 * top else 12),
                textcoords="offset points",
                ha="right" if right else "left",
                color=INK,
            )
        axes.set(xlim=(0, 1), ylim=(0, min(1.0, top)), xlabel="share of tickets routed")
        axes.set_ylabel("share of all tickets misrouted" if per_ticket else "share of those wrong")
        axes.xaxis.set_major_formatter(PercentFormatter(1, 0))
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.legend(loc="upper left")

    return drawn("risk_coverage", "Error rate among the routed against the share routed.", (5.4, 3.9), draw)


def confidence_figure(confidence: Sequence[float], right: Sequence[bool]) -> Drawn:
    """How sure the right and the wrong answers were."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        sure = [p for p, hit in zip(confidence, right, strict=True) if hit]
        unsure = [p for p, hit in zip(confidence, right, strict=True) if not hit]
        edges = np.linspace(0, 1, 21)
        axes.hist(
            [unsure, sure],
            bins=edges.tolist(),
            stacked=True,
            color=[BAD, GOOD],
            label=[f"wrong ({len(unsure)})", f"right ({len(sure)})"],
            rwidth=0.9,
        )
        axes.set(xlim=(0, 1), xlabel="stated probability", ylabel="tickets")
        axes.xaxis.set_major_formatter(PercentFormatter(1, 0))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.legend(loc="upper left")

    return drawn("confidence", "Stated probabilities of right and of wrong answers.", (5.4, 3.4), draw)


def confusion_figure(matrix: Sequence[Sequence[int]], categories: Sequence[str]) -> Drawn:
    """Rows are true labels (the last: no category), columns what was predicted; shaded by share of the row."""
    counts = np.array(matrix)
    names = [*categories, "(no category)"]
    if counts[-1].sum() == 0:
        counts, names = counts[:-1], names[:-1]
    size = len(categories)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        rows = counts.sum(axis=1, keepdims=True)
        axes.imshow(np.divide(counts, rows, out=np.zeros(counts.shape), where=rows > 0), cmap=SHADES, vmin=0, vmax=1)
        small = max(4.0, min(9.0, 90 / size))
        axes.set_xticks(range(size), categories, rotation=45, ha="right", rotation_mode="anchor", fontsize=small)
        axes.set_yticks(range(len(names)), names, fontsize=small)
        axes.set(xlabel="predicted", ylabel="true label")
        axes.grid(False)
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
        if size <= MANY_CATEGORIES:
            for i, row in enumerate(counts):
                for j, count in enumerate(row):
                    if count:
                        ink = PAPER if count > 0.55 * rows[i, 0] else INK
                        axes.text(j, i, str(count), ha="center", va="center", color=ink, fontsize=small)

    side = min(9.0, 2.6 + 0.42 * size)
    return drawn("confusion", "True labels against predicted labels.", (side + 0.6, side), draw)


def certificates_figure(certificates: Sequence[Certificate]) -> Drawn:
    """Per certificate: errors in what it counts, the bound under which the true rate lies, and the alpha it keeps."""
    shown = [c for c in certificates if c.certified]
    per_ticket = any(c.procedure == "misroutes_per_ticket" for c in shown)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for row, c in enumerate(reversed(shown)):
            out_of = c.n if per_ticket else c.m
            rate, upper = c.k / out_of, clopper_pearson_upper(c.k, out_of, c.level)
            axes.plot([rate, upper], [row, row], color=GOOD, linewidth=2.4, solid_capstyle="round")
            axes.scatter([rate], [row], s=44, color=GOOD, zorder=3, clip_on=False)
            axes.plot([c.alpha, c.alpha], [row - 0.36, row + 0.36], color=LIMIT, linewidth=2)
            words = f"k {c.k} of {'n' if per_ticket else 'm'} {out_of}"
            axes.text(1.02, row, words, transform=axes.get_yaxis_transform(), va="center", color=MUTED)
        axes.set_yticks(range(len(shown)), [c.group for c in reversed(shown)])
        axes.set(xlim=(0, None), ylim=(-0.7, len(shown) - 0.3))
        axes.set_xlabel("share of all tickets misrouted" if per_ticket else "share of the routed that is wrong")
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.grid(False, axis="y")

    alt = "Errors, their upper bound and alpha, for each certificate."
    return drawn("certificates", alt, (5.8, 1.1 + 0.36 * max(1, len(shown))), draw)


def shares_figure(
    name: str, alt: str, categories: Sequence[str], series: Sequence[tuple[str, Sequence[float]]]
) -> Drawn:
    """Shares per category in label order, one mark a series."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        y = np.arange(len(categories))[::-1]
        table = np.array([values for _, values in series])
        axes.hlines(y, table.min(axis=0), table.max(axis=0), color=GRID, linewidth=3, zorder=1)
        looks = ((INK, "D", 34), (PALE, "o", 46), (GOOD, "o", 46), (BAD, "s", 38), (LIMIT, "^", 42))
        for (label, values), (colour, marker, size) in zip(series, looks, strict=False):
            axes.scatter(
                values,
                y,
                s=size,
                color=colour,
                marker=marker,
                edgecolor=PAPER,
                linewidth=0.8,
                label=label,
                clip_on=False,
            )
        axes.set_yticks(y, categories)
        axes.set(xlim=(0, None), xlabel="share of tickets")
        axes.xaxis.set_major_formatter(PercentFormatter(1, 0))
        axes.grid(False, axis="y")
        _legend_above(axes, len(series))

    return drawn(name, alt, (5.4, 1.4 + 0.30 * len(categories)), draw)


def flips_figure(rates: Sequence[tuple[str, float, float, float, bool]]) -> Drawn:
    """(name, rate, lower, upper, whether it is the control) of each comparison of two runs."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for row, (_, rate, lower, upper, control) in enumerate(reversed(rates)):
            colour = PALE if control else LIMIT
            axes.barh(row, rate, height=0.5, color=colour)
            axes.plot([lower, upper], [row, row], color=INK, linewidth=1.2)
        axes.set_yticks(range(len(rates)), [name for name, *_ in reversed(rates)])
        axes.set(xlim=(0, None), xlabel="share of tickets whose label changed")
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.grid(False, axis="y")

    return drawn("flips", "Share of tickets whose label changed.", (5.4, 1.1 + 0.42 * max(1, len(rates))), draw)


def _legend_above(axes: Axes, columns: int) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0.2, columnspacing=1.4)


def drawn(name: str, alt: str, size: tuple[float, float], draw: Callable[[Figure], None]) -> Drawn:
    """What `draw` puts on a figure of this size (inches), in the style that all of them have."""
    with _style(name):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        svg, png = io.BytesIO(), io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
        figure.savefig(png, format="png", dpi=PNG_DPI, metadata={"Software": None})
    return Drawn(name, alt, svg.getvalue(), png.getvalue())


@contextmanager
def _style(salt: str) -> Iterator[None]:
    """Text becomes paths, so that a page looks the same without any font; ids are the same in every run."""
    settings: dict[Any, Any] = {  # the stubs name every key of one matplotlib version
        "font.family": "DejaVu Sans",  # comes with matplotlib; category ids are ASCII
        "font.size": 9,
        "text.color": INK,
        "axes.edgecolor": PALE,
        "axes.labelcolor": MUTED,
        "axes.facecolor": PAPER,
        "figure.facecolor": PAPER,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "xtick.color": MUTED,
        "ytick.color": INK,
        "legend.frameon": False,
        "svg.fonttype": "path",
        "svg.hashsalt": salt,
    }
    with mpl.rc_context(settings):
        yield
