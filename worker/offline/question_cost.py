"""Question cost: what a ticket takes with one question, with two, with three, in one run over the same tickets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from worker.core.ticket import Ticket
from worker.offline.scoring import Progress
from worker.runtime.router import Router, route_all


@dataclass(frozen=True, slots=True)
class QuestionCost:
    """Tickets with the first `questions` questions each; `added` is the last of them."""

    added: str
    questions: int
    seconds: tuple[float, ...]
    """For one ticket on average, one value a round."""
    tokens: int
    """Of what stands behind the ticket in the question's own prompt."""
    unanswered: int
    """Answers of the last round that could not be scored."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


async def measure_question_costs(
    routers: Sequence[tuple[str, int, Router]],
    tickets: Sequence[Ticket],
    *,
    rounds: int,
    at_once: int,
    clock: Callable[[], float],
    progress: Progress,
) -> tuple[QuestionCost, ...]:
    """`routers` ask one question more each: its name, its tokens. Rounds alternate between them, so that a machine that
    gets slower does so for all. Every pass has its number behind each text, so that none is answered from the cache or
    together with an equal one.
    """
    seconds: list[list[float]] = [[] for _ in routers]
    unanswered = [0] * len(routers)
    warm_up = [_marked(ticket, 0) for ticket in tickets[:1]]
    await route_all(routers[-1][2], warm_up, at_once)  # the prefix is computed, and every label has been asked for
    progress(0, rounds * len(routers))
    for turn in range(rounds):
        for number, (_, _, router) in enumerate(routers):
            mark = turn * len(routers) + number + 1
            fresh = [_marked(ticket, mark) for ticket in tickets]
            began = clock()
            routed = await route_all(router, fresh, at_once)
            seconds[number].append((clock() - began) / len(tickets))
            unanswered[number] = sum(
                (one.decision.scores is None) + sum(answer.label_scores is None for answer in one.decision.answers)
                for one in routed
            )
            progress(mark, rounds * len(routers))
    return tuple(
        QuestionCost(name, number, tuple(seconds[number - 1]), tokens, unanswered[number - 1])
        for number, (name, tokens, _) in enumerate(routers, 1)
    )


def _marked(ticket: Ticket, mark: int) -> Ticket:
    """Another ticket to cache and batches, about as long."""
    return replace(ticket, text=f"{ticket.scored_text} ({mark})", shortened=None)
