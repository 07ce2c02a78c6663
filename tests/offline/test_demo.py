"""The demo: what it counts, what it says of it, and how long it says it takes."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from worker.adapters.files import SAMPLES_FILE, Labelled, load_labelled, load_rule_set
from worker.console.demo import print_demo, print_estimate
from worker.core.rules import RuleSet
from worker.offline.demo import DeskResult, Pass, sentence_of, with_estimate

ROOT = Path(__file__).parents[2]
HELPDESK = load_rule_set(ROOT / "routing_rules/helpdesk")
COMPLAINTS = load_rule_set(ROOT / "routing_rules/civil_complaints")


def decided(number: int, category: str, *, cached: bool = False) -> dict[str, Any]:
    values = {"score": "0.9", "threshold": "0.8", "confidence": "90 %", "promise": "at most 10 % are wrong"}
    return {
        "ticket_id": str(number),
        "action": "route",
        "category": category,
        "probability": 0.9,
        "cached": cached,
        "reasons": [{"code": "certified", "sentence": "The score is above the threshold.", "values": values}],
        "timings": {"total_ms": 5.0},
    }


def routed(right: int, wrong: int, rule_set: RuleSet = HELPDESK) -> DeskResult:
    """So many tickets of the first category, of which some went to the second."""
    first, second = rule_set.categories.ids[:2]
    count = right + wrong
    tickets = tuple(Labelled(id=str(n), text=f"number {n}", label=first) for n in range(count))
    envelopes = tuple(decided(n, first if n < right else second) for n in range(count))
    return DeskResult(rule_set, None, tickets, (Pass(envelopes, 0, 1.0),))


def shown(*results: DeskResult) -> str:
    console = Console(file=io.StringIO(), width=240)
    print_demo(console, results)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("right", "wrong", "verdict"),
    [
        (6, 0, "0 of 6 (0.0%): too few to judge"),
        (5, 1, "1 of 6 (16.7%): too few to judge"),
        (96, 2, "2 of 98 (2.0%): within the promise"),
        (40, 30, "30 of 70 (42.9%): above what was promised, beyond chance"),
    ],
)
def test_an_error_rate_is_judged_only_where_the_interval_leaves_alpha_out(right: int, wrong: int, verdict: str) -> None:
    assert verdict in shown(routed(right, wrong))
    assert "promised: at most 10%, with 90% confidence" in shown(routed(right, wrong))


def test_each_rule_set_has_a_column() -> None:
    head = shown(routed(3, 0), routed(3, 0, COMPLAINTS)).splitlines()[1]
    assert "helpdesk (en)" in head
    assert "civil_complaints (ko)" in head


def test_decisions_of_a_korean_desk_are_explained_in_korean() -> None:
    envelope = decided(1, "waste")
    assert sentence_of(envelope, HELPDESK) == "The score is above the threshold."
    assert "인증된 기준" in sentence_of(envelope, COMPLAINTS)
    assert "인증된 기준" in shown(routed(1, 0, COMPLAINTS))


def test_tickets_whose_scores_are_never_kept_are_counted_beside_the_cache_hits() -> None:
    result = routed(2, 0)
    assert "never kept" not in shown(result)
    samples = load_labelled(ROOT / "routing_rules/helpdesk" / SAMPLES_FILE, HELPDESK.categories.ids)
    steering = next(ticket for ticket in samples if ticket.id == "h145")
    tickets = (replace(result.tickets[0], text=steering.text), result.tickets[1])
    assert "1 never kept" in shown(replace(result, tickets=tickets))


def test_the_estimate_is_told_once_and_leaves_the_first_ticket_out() -> None:
    now = 0.0
    moved: list[tuple[int, int]] = []
    told: list[float] = []
    move = with_estimate(lambda done, total: moved.append((done, total)), 120, lambda: now, told.append)
    move(0, 60)
    now = 30.0  # the model is loaded, and the prompt that all share computed
    move(1, 60)
    for done in range(2, 20):
        now += 0.5
        move(done, 60)
    assert told == [60.0]
    assert moved == [(0, 60), *((done, 60) for done in range(1, 20))]


@pytest.mark.parametrize(("seconds", "said"), [(42.4, "about 42 s"), (300.0, "about 5 minutes")])
def test_the_estimate_names_the_shorter_way(seconds: float, said: str) -> None:
    console = Console(file=io.StringIO(), width=120)
    print_estimate(console, seconds)
    assert isinstance(console.file, io.StringIO)
    assert said in console.file.getvalue()
    assert 'make demo ARGS="--tickets 10"' in console.file.getvalue()
