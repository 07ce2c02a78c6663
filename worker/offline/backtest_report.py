"""The page of a backtest: both sides, what moves where, the queue of people, and what a log cannot tell."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from worker.offline.backtest import Backtest
from worker.offline.counted import HOURS, Counted
from worker.offline.figures import GOOD, PALE, Drawn, drawn
from worker.offline.report import Report, page


def backtest_report(backtest: Backtest) -> Report:
    """One self-contained page, as all reports are."""
    was, now = backtest.recorded, backtest.replayed
    ends = sorted({end for pair in backtest.moves for end in pair}, key=lambda end: (-was.ends.get(end, 0), end))
    names = dict.fromkeys((*was.queue, *now.queue))
    return page(
        "backtest.html.j2",
        [_queue_figure(was, now)],
        backtest=backtest,
        ends=ends,
        reasons=list(dict.fromkeys((*was.reasons, *now.reasons))),
        categories=sorted({*was.wrong_by_category, *now.wrong_by_category}),
        queues=[
            {
                "category": name,
                "was": sum(was.queue.get(name, ())),
                "now": sum(now.queue.get(name, ())),
                "was_peak": _peak(was.queue.get(name, ())),
                "now_peak": _peak(now.queue.get(name, ())),
            }
            for name in names
        ],
        limits=limits(backtest),
    )


def limits(backtest: Backtest) -> tuple[str, ...]:
    """What was refused or kept as it was, and what a log does not hold; a sentence each."""
    said = [f"{n} of {backtest.lines} decisions refused: {why}." for why, n in backtest.refused.items()]
    rules = {
        True: "The new overrides differ from the old ones, and what they would take is not foreseen",
        False: "The overrides are the same",
        None: "What the new overrides would take is not foreseen",
    }[backtest.overrides_differ]
    said.append(
        f"{backtest.kept_overrides} decisions of overrides kept as they were: overrides read the ticket's text, which "
        f"a decision does not hold. {rules}."
    )
    said += [f"{n} decisions without scores kept as they were: {code}." for code, n in backtest.kept_unscored.items()]
    said += [
        f"{n} tickets would route by score and stay with people: {code} came of a second look at the text."
        for code, n in backtest.kept_second_look.items()
    ]
    if backtest.asked_again:
        said.append(
            f"{backtest.asked_again} tickets that would route are asked again first (gates.other_order_margin): some "
            "of them may yet go to people."
        )
    said += [
        f"Rules over answers to '{question}' were left out for {n} decisions, which hold no such scores."
        for question, n in backtest.questions_left_out.items()
    ]
    said.append(
        "Tickets that newly route and address the router (docs/rule-sets.md) would be looked at again before they do."
    )
    return tuple(said)


def _peak(hours: Sequence[int]) -> str:
    if not any(hours):
        return "–"
    hour = max(range(len(hours)), key=hours.__getitem__)
    return f"{hour:02d}:00, {hours[hour]}"


def _queue_figure(was: Counted, now: Counted) -> Drawn:
    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        width = 0.4
        for side, colour, name, shift in ((was, PALE, "as recorded", -width / 2), (now, GOOD, "new rules", width / 2)):
            counts = [sum(hours[hour] for hours in side.queue.values()) for hour in range(HOURS)]
            axes.bar([hour + shift for hour in range(HOURS)], counts, width=width, color=colour, label=name)
        axes.set(xlabel="hour of the day, UTC", ylabel="tickets to people", xlim=(-0.7, HOURS - 0.3))
        axes.xaxis.set_major_locator(MaxNLocator(HOURS // 2, integer=True))
        axes.grid(False, axis="x")
        axes.legend(loc="upper left")

    return drawn(
        "queue", "Tickets to people by hour of the day, as recorded and under the new rules.", (7.2, 3.2), draw
    )
