"""Answers in writing: what counts as one, and that nothing can be routed by them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import get_args

import pytest

from tests.offline.populations import question, scored
from worker.adapters.writing import Way, WritingClient, Written
from worker.errors import ConfigError, RequestRefused
from worker.offline.scoring import Progress
from worker.offline.writing import WAYS, compare_writing, parse_written
from worker.ports import ScoringEngine
from worker.settings import EngineName

WORDS = ("billing", "login", "bug")


@pytest.mark.parametrize(
    ("way", "text", "place"),
    [
        ("word", " billing", 0),
        ("word", " Login.\n\nTicket: another", 1),
        ("word", "`bug`", 2),
        ("word", " billing or login", None),
        ("word", "bill", None),
        ("word", "", None),
        ("json", '{"answer": "bug"}', 2),
        ("json", '{"answer": "BUG"}', 2),
        ("json", '{"answer": "refund"}', None),
        ("json", '{"answer": null}', None),
        ("json", '{"category": "bug"}', None),
        ("json", '["bug"]', None),
        ("json", 'Here you are: {"answer": "bug"}', None),
        ("json", '{"answer": "bu', None),
        ("thinking", "<think>login? no</think>\nAnswer: billing", 0),
        ("thinking", "It could be Answer: bug, but no.\nAnswer: **login**", 1),
        ("thinking", "<think>Answer: billing", None),
        ("thinking", "<think>Answer: billing</think> I cannot say.", None),
        ("thinking", "billing", None),
    ],
)
def test_only_a_label_by_itself_is_an_answer(way: Way, text: str, place: int | None) -> None:
    assert parse_written(text, WORDS, way) == place


class ScriptedWriter:
    """Right, another label, nonsense and a refusal in turns."""

    def __init__(self, words: Sequence[str]) -> None:
        self.turn = itertools.cycle(range(4))
        self.seen: list[tuple[str, Way]] = []

    async def write(self, prompt: str, words: Sequence[str], way: Way) -> Written:
        self.seen.append((prompt, way))
        turn = next(self.turn)
        if turn == 3:
            raise RequestRefused("too long")
        text = (words[0], words[1], "I would say that")[turn]
        return Written({"json": f'{{"answer": "{text}"}}', "thinking": f"Answer: {text}"}.get(way, text), 4)


async def test_every_way_is_counted_over_the_same_tickets() -> None:
    asked = question()
    tickets = [t for t in scored(200, 1) if t.label == 0][:8]
    bars: list[str] = []

    def start(name: str) -> Progress:
        bars.append(name)
        return lambda done, total: None

    writer = ScriptedWriter(asked.primitive.labels.words)
    clock = iter(range(100))
    scoring, *written = await compare_writing(asked, writer, tickets, 0.25, lambda: next(clock), start)
    assert (scoring.way, scoring.n, scoring.unparsable, scoring.seconds) == ("scoring", 8, 0, 0.25)
    assert bars == list(WAYS) == [row.way for row in written]
    for row in written:
        assert (round(row.right.value * 8), row.wrong, row.unparsable, row.refused) == (2, 2, 2, 2)
        assert row.tokens == 3.0
        assert row.seconds == 1 / 8
    assert writer.seen[0][0] == asked.primitive.request(tickets[0].text).prompt


async def test_nothing_to_compare_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="nothing to compare"):
        await compare_writing(
            question(), ScriptedWriter(()), [], 0.0, lambda: 0.0, lambda name: lambda done, total: None
        )


def test_what_writes_can_never_be_an_engine() -> None:
    """No score, no identity, no name among the settings: there is no way from it to a route."""
    needed = {name for name in vars(ScoringEngine) if not name.startswith("_")} - {"aclose"}
    assert {"score", "tokenize", "identity", "probe"} <= needed
    assert not needed & set(dir(WritingClient))
    assert not any("writ" in name or "generat" in name for name in get_args(EngineName))
