"""Self-test: whether an engine can be used for a rule set at all, before anybody labels a ticket for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from worker.adapters.files import Labelled
from worker.core.score_form import RoutedLabel, raw_margin
from worker.errors import ConfigError
from worker.offline.measures import Measured, share
from worker.offline.near_duplicates import collapse
from worker.offline.scoring import Progress, ScoredTicket, Sleep, score_labelled
from worker.ports import ScoringEngine
from worker.runtime.question import EasyCheck, Question, check_easy_tickets, in_another_order

UNSTABLE = 0.05
"""More flips than this between identical runs, by the lower end of the interval, and a certificate means little."""
ORDER_BOUND = 0.30
"""More flips than this between label orders, by the lower end of the interval, and much depends on a fixed order."""


@dataclass(frozen=True, slots=True)
class Flips:
    """Tickets whose top label differs between two runs over the same tickets.

    `margins` are top1 - top2 in nats, in the first run, of those that flipped.
    """

    name: str
    n: int
    flips: int
    rate: Measured
    margins: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LabelToken:
    """One category's label: the word in the prompt, and the single token it is behind the answer cue."""

    category: str
    word: str
    token_id: int


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What the engine does with this rule set's question. Shares are of top labels, uncalibrated."""

    question: Question
    n: int
    unscored: int
    easy: EasyCheck
    labels: tuple[LabelToken, ...]
    repeats: tuple[Flips, ...]
    """Identical questions again, in batches of other neighbours: the control."""
    orders: tuple[Flips, ...]
    """The same tickets under rotated category orders."""
    shares: tuple[tuple[str, tuple[float, ...]], ...]
    """Per category: the predicted share under each order, the configured one first."""
    by_position: tuple[float, ...]
    """Share predicted at each place of the order, averaged over the orders; even where places do not matter and the
    orders go all the way round."""
    accuracy: Measured | None
    """Under the configured order, where the tickets are labelled."""
    pairs: tuple[tuple[ScoredTicket, ScoredTicket], ...]
    """Each ticket in the first two identical runs: what the margin gate is estimated from."""
    problems: tuple[str, ...]
    """Why the engine is not usable, a sentence each."""
    cautions: tuple[str, ...]
    """What does not break a certificate but leaves little to certify."""

    @property
    def usable(self) -> bool:
        return not self.problems


async def selftest(
    question: Question,
    engine: ScoringEngine,
    tickets: Sequence[Labelled],
    *,
    batch_items: int,
    progress: Progress,
    sleep: Sleep,
    repeat: int = 2,
    orders: int = 1,
    journal: Path | None = None,
) -> SelfTest:
    """Ask everything `repeat` times under the configured order, and once under each of `orders` rotations of it.

    Tickets may be unlabelled (an empty label). `progress` counts tickets over all runs. Raises EngineUnavailable,
    LabelError, ConfigError.
    """
    rotations = _rotations(len(question.rule_set.categories.ids), orders)
    runs = repeat + len(rotations)
    easy = await check_easy_tickets(question, engine)

    def counted(run: int) -> Progress:
        return lambda done, total: progress(run * total + done, runs * total)

    turns = [
        await score_labelled(question, engine, tickets, journal, batch_items, counted(turn), sleep=sleep, turn=turn)
        for turn in range(repeat)
    ]
    turned = []
    for number, rotation in enumerate(rotations):
        asked = await rotated(question, engine, rotation)
        rows = await score_labelled(asked, engine, tickets, journal, batch_items, counted(repeat + number), sleep=sleep)
        turned.append([_turned_back(row, rotation) for row in rows])
    kept = {ticket.id for ticket in collapse(turns[0]).kept}
    complete = [
        rows for rows in zip(*turns, *turned, strict=True) if rows[0].id in kept and not any(r.problem for r in rows)
    ]
    if not complete:
        raise ConfigError(f"none of {len(tickets)} tickets could be scored in every run; the engine refused them")
    top = [[raw_margin(row.logprobs) for row in rows] for rows in complete]
    repeats = tuple(count_flips(f"identical run {run + 1}", top, run) for run in range(1, repeat))
    order_flips = tuple(count_flips(f"order turned by {r}", top, repeat + i) for i, r in enumerate(rotations))
    ids = question.rule_set.categories.ids
    asked_orders = [(0, 0), *((repeat + i, rotation) for i, rotation in enumerate(rotations))]
    shares, by_position = _by_category_and_place([[t.index for t in row] for row in top], ids, asked_orders)
    labelled = [(row[0].index, rows[0].label) for row, rows in zip(top, complete, strict=True)]
    named = any(ticket.label for ticket in tickets)
    floor = question.rule_set.rules.gates.min_label_mass
    labels = question.primitive.labels
    return SelfTest(
        question=question,
        n=len(complete),
        unscored=len(kept) - len(complete),
        easy=easy,
        labels=tuple(map(LabelToken, ids, labels.words, labels.token_ids)),
        repeats=repeats,
        orders=order_flips,
        shares=shares,
        by_position=by_position,
        accuracy=share(sum(guess == label for guess, label in labelled), len(labelled)) if named else None,
        pairs=tuple((rows[0], rows[1]) for rows in complete) if repeat > 1 else (),
        problems=_problems(easy, floor, repeats, sum(bool(rows[0].unknown) for rows in complete)),
        cautions=_cautions(order_flips, len(kept) - len(complete)),
    )


async def rotated(question: Question, engine: ScoringEngine, rotation: int) -> Question:
    """The same question with the categories turned by `rotation` places in examples and legend. Words stay with their
    categories; letters stay with their places. Raises LabelError.
    """
    return await in_another_order(question, rotation, engine.tokenize)


def _rotations(size: int, orders: int) -> tuple[int, ...]:
    """`orders` rotations, evenly spread; fewer where there are fewer categories."""
    return tuple(dict.fromkeys(r for i in range(1, orders + 1) if (r := round(size * i / (orders + 1)) % size)))


def _turned_back(row: ScoredTicket, rotation: int) -> ScoredTicket:
    """Label and scores of a rotated question in the configured order."""
    label = (row.label + rotation) % len(row.logprobs) if row.label >= 0 and row.logprobs else row.label
    unknown = tuple(sorted((place + rotation) % len(row.logprobs) for place in row.unknown))
    return replace(row, label=label, logprobs=row.logprobs[-rotation:] + row.logprobs[:-rotation], unknown=unknown)


def count_flips(name: str, top: Sequence[Sequence[RoutedLabel]], run: int) -> Flips:
    """Between the first run and another. `top` has a row for each ticket, with the first label of each run."""
    flipped = [row[0].score for row in top if row[0].index != row[run].index]
    return Flips(name, len(top), len(flipped), share(len(flipped), len(top)), tuple(sorted(flipped)))


def _by_category_and_place(
    top: Sequence[Sequence[int]], ids: Sequence[str], turns: Sequence[tuple[int, int]]
) -> tuple[tuple[tuple[str, tuple[float, ...]], ...], tuple[float, ...]]:
    """Predicted share of each category under each order, and of each place over the orders. `turns`: the run that
    stands for an order and how far the order is turned in it.
    """
    size, n = len(ids), len(top)
    shares = [[sum(row[run] == i for row in top) / n for run, _ in turns] for i in range(size)]
    places = [
        sum(shares[(place + rotation) % size][order] for order, (_, rotation) in enumerate(turns)) / len(turns)
        for place in range(size)
    ]
    return tuple((c, tuple(row)) for c, row in zip(ids, shares, strict=True)), tuple(places)


def _problems(easy: EasyCheck, floor: float, repeats: Sequence[Flips], partial: int) -> tuple[str, ...]:
    found = [problem] if (problem := easy.problem(floor)) else []
    if 2 * easy.right < len(easy.masses):
        found.append(
            f"of {len(easy.masses)} tickets that the prompt itself shows with their answer, {easy.right} are answered "
            "rightly: the model does not follow the prompt"
        )
    if partial:
        found.append(
            f"on {partial} tickets the engine does not return every label, so that no calibration can be fitted: use "
            "an engine that does, let the server return more, or ask about fewer categories"
        )
    for run in repeats:
        if run.rate.lower > UNSTABLE:
            found.append(
                f"{run.name}: {run.flips} of {run.n} tickets change their label when nothing else changes, and a "
                "certificate describes an engine that answers the same question the same way"
            )
    return tuple(found)


def _cautions(orders: Sequence[Flips], unscored: int) -> tuple[str, ...]:
    found = [
        f"{run.name}: {run.flips} of {run.n} tickets change their label with the order of the categories; a better "
        "prompt, more examples or a larger model would route more"
        for run in orders
        if run.rate.lower > ORDER_BOUND
    ]
    if unscored:
        found.append(f"{unscored} tickets could not be scored in every run (too long, or refused): people get those")
    return tuple(found)
