"""Multiple choice: what is asked, what is counted, and what nothing is concluded from."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest

from tests.core.test_systemone import tokenize
from tests.runtime.engines import IDENTITY
from worker.adapters.choices_file import Choice, load_choices
from worker.adapters.llama_cpp import LlamaCppEngine
from worker.adapters.writing import Way, Written
from worker.core.scores import LabelScores, ScoreRequest
from worker.core.turns import TEMPLATES
from worker.errors import ConfigError, EngineUnavailable, LabelError, TooLong
from worker.offline.choices import INSTRUCTION, Pass, evaluate_choices, put_choices, summarise_choices
from worker.offline.scoring import Progress
from worker.ports import EngineIdentity
from worker.runtime.sent import Sent

OWN = Path(__file__).with_name("choices.jsonl")


def choices(n: int, options: int = 4) -> list[Choice]:
    names = [f"thing {letter}" for letter in "abcdefgh"[:options]]
    return [Choice(f"q{i}", f"Question {i}: which one?", tuple(names), i % options) for i in range(n)]


class FirstPlace:
    """Always answers the first option with .7; counts who asks at the same time."""

    def __init__(self, refused: str = "nothing") -> None:
        self.asked: list[ScoreRequest] = []
        self.tokenized = 0
        self.under_way = 0
        self.most = 0
        self.refused = refused
        self.flipping: set[str] = set()

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        self.asked += requests
        self.under_way += len(requests)
        self.most = max(self.most, self.under_way)
        crowded = self.under_way > 1
        for _ in range(3):
            await asyncio.sleep(0)
        crowded = crowded or self.under_way > 1
        self.under_way -= len(requests)
        if self.refused in str(requests[0].item):
            raise TooLong(2000, 1000)
        return [self._row(request, crowded) for request in requests]

    def _row(self, request: ScoreRequest, crowded: bool) -> LabelScores:
        size = len(request.label_token_ids)
        other = crowded and any(mark in str(request.item) for mark in self.flipping)
        shares = [0.7 if place == int(other) else 0.3 / (size - 1) for place in range(size)]
        return LabelScores.from_logprobs(tuple(math.log(0.5 * share) for share in shares))

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        self.tokenized += 1
        return await tokenize(list(texts))

    async def identity(self) -> EngineIdentity:
        return IDENTITY

    async def probe(self) -> None: ...

    async def aclose(self) -> None: ...


class Clock:
    """A second later whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


async def no_sleep(seconds: float) -> None: ...


def silent(name: str) -> Progress:
    return lambda done, total: None


async def test_labels_are_looked_for_once_for_each_number_of_options() -> None:
    engine = FirstPlace()
    await put_choices([*choices(1, 2), *choices(1, 4)], None, engine, Sent())
    few = engine.tokenized
    asked = await put_choices([*choices(30, 2), *choices(30, 4)], None, engine, Sent())
    assert engine.tokenized == 2 * few
    assert {len(one.plain.labels.words) for one in asked} == {2, 4}


@pytest.mark.parametrize("template", [None, "chatml"])
async def test_every_label_is_one_token_behind_every_prompt(template: str | None) -> None:
    """Checked behind one prompt, used behind all."""
    turns = None if template is None else TEMPLATES["chatml"]
    found = load_choices(OWN)
    for one in await put_choices(found, turns, FirstPlace(), Sent()):
        whole = one.in_turns.prompt.prefix + one.in_turns.prompt.item(one.text)
        bare, *extended = await tokenize([whole, *(f"{whole} {word}" for word in one.in_turns.labels.words)])
        assert tuple(ids[-1] for ids in extended) == one.in_turns.labels.token_ids
        assert all(ids[:-1] == bare for ids in extended)
        assert ("<|im_start|>" in whole) == (template is not None)
        assert "<|" not in one.plain.prompt.prefix


async def test_the_model_sees_question_options_and_text() -> None:
    alone = Choice("a", "Which barks?", ("dog", "cat"), 0)
    about = Choice("b", "What is wanted?", ("refund", "visit"), 0, text="Send the money back.")
    first, second = await put_choices([alone, about], None, FirstPlace(), Sent())
    assert first.plain.prompt.prefix == f"{INSTRUCTION}\nA: dog\nB: cat\n\nText:"
    assert first.plain.prompt.item(first.text) == " Which barks?\nAnswer:"
    assert second.plain.prompt.prefix.startswith("What is wanted?\nA: refund\n")
    assert second.text == "Send the money back."


async def test_a_model_that_likes_a_place_is_seen_to() -> None:
    engine = FirstPlace()
    asked = await put_choices(choices(20), None, engine, Sent())
    result = await evaluate_choices(asked, engine, at_once=4, seed=1, clock=Clock(), sleep=no_sleep, start=silent)
    assert (result.questions, len(result.answered), result.accuracy.value) == (20, 20, 0.25)
    assert result.accuracy.lower == pytest.approx(0.0866, abs=1e-3)  # Clopper & Pearson, 5 of 20
    assert result.accuracy.upper == pytest.approx(0.4910, abs=1e-3)
    assert result.by_chance == 0.25 and result.mean_confidence == pytest.approx(0.7)
    assert [(p.offered, p.labelled, p.predicted, p.right) for p in result.places] == [(20, 5, 20, 5)] + [
        (20, 5, 0, 0)
    ] * 3
    (band,) = [band for band in result.bands if band.n]
    assert (band.n, band.errors, band.accuracy) == (20, 15, 0.25)
    assert result.median_mass == pytest.approx(0.5)
    assert engine.most == 4
    assert [(p.at_once, len(p.seconds)) for p in result.passes] == [(1, 20), (1, 20), (4, 20)]
    assert result.passes[0].seconds_at(50) == 1.0 < result.passes[2].seconds_at(50)
    assert orjson.loads(orjson.dumps(result.to_dict()))["places"][0]["predicted"] == 20


async def test_answers_that_change_under_load_are_told_from_those_that_change_anyhow() -> None:
    engine = FirstPlace()
    engine.flipping = {"Question 3:", "Question 5:"}
    asked = await put_choices(choices(8), None, engine, Sent())
    result = await evaluate_choices(asked, engine, at_once=4, seed=1, clock=Clock(), sleep=no_sleep, start=silent)
    assert [(flips.n, flips.flips) for flips in result.flips] == [(8, 0), (8, 2)]


async def test_what_could_not_be_scored_is_counted_and_not_taken_for_wrong() -> None:
    engine = FirstPlace(refused="Question 0:")
    asked = await put_choices(choices(8), None, engine, Sent())
    result = await evaluate_choices(asked, engine, at_once=2, seed=1, clock=Clock(), sleep=no_sleep, start=silent)
    assert result.unscored == (("too_long", 1),)
    assert (result.questions, len(result.answered), result.flips[0].n) == (8, 7, 7)
    assert result.accuracy.value == pytest.approx(1 / 7)
    engine.refused = "Question"
    with pytest.raises(ConfigError, match="8 too_long"):
        await evaluate_choices(asked, engine, at_once=2, seed=1, clock=Clock(), sleep=no_sleep, start=silent)


async def test_an_engine_that_stays_away_ends_the_evaluation() -> None:
    class Away(FirstPlace):
        async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
            raise EngineUnavailable("away")

    asked = await put_choices(choices(4), None, FirstPlace(), Sent())
    with pytest.raises(EngineUnavailable):
        await evaluate_choices(asked, Away(), at_once=2, seed=1, clock=Clock(), sleep=no_sleep, start=silent)


async def test_no_labels_is_an_error_before_anything_is_asked() -> None:
    class NoWords(FirstPlace):
        async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
            return [list(text.encode()) for text in texts]

    engine = NoWords()
    with pytest.raises(LabelError):
        await put_choices(choices(4), None, engine, Sent())
    assert not engine.asked


def test_a_label_that_was_not_returned_only_lowers_the_confidence() -> None:
    (choice,) = choices(1)
    row = LabelScores.from_logprobs(tuple(map(math.log, (0.6, 0.1, 0.1, 0.1))), (2, 3))
    result = summarise_choices([choice], [Pass("alone", 1, (row,), (1.0,))], seed=1)
    assert result.partial == 1
    assert result.answered[0].confidence == pytest.approx(0.6 / 0.9)


def test_places_flips_and_partial_answers_count_only_the_questions_that_they_are_about() -> None:
    def row(*shares: float, unknown: tuple[int, ...] = ()) -> LabelScores:
        return LabelScores.from_logprobs(tuple(map(math.log, shares)), unknown)

    asked = [*choices(1, 2), *choices(2, 4)]
    first = (row(0.6, 0.3), row(0.1, 0.6, 0.1, 0.1, unknown=(3,)), row(0.1, 0.1, 0.1, 0.6))
    again = (row(0.3, 0.6), "too_long", row(0.1, 0.1, 0.1, 0.6))
    result = summarise_choices(
        asked, [Pass("alone", 1, first, (1.0,) * 3), Pass("again", 1, again, (1.0,) * 3)], seed=1
    )
    assert [(p.offered, p.labelled, p.predicted) for p in result.places] == [(3, 2, 1), (3, 1, 1), (2, 0, 0), (2, 0, 1)]
    assert result.partial == 1
    assert [(flips.n, flips.flips) for flips in result.flips] == [(2, 1)]


class Writer:
    """Writes the first word."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Way]] = []

    async def write(self, prompt: str, words: Sequence[str], way: Way) -> Written:
        self.seen.append((prompt, way))
        return Written(
            {"json": f'{{"answer": "{words[0]}"}}', "thinking": f"Hm.\nAnswer: {words[0]}"}.get(way, words[0]), 3
        )


async def test_the_same_questions_are_written_and_only_so_many() -> None:
    engine, writer = FirstPlace(refused="Question 0:"), Writer()
    asked = await put_choices(choices(12), TEMPLATES["chatml"], engine, Sent())
    result = await evaluate_choices(
        asked,
        engine,
        at_once=2,
        seed=1,
        clock=Clock(),
        sleep=no_sleep,
        start=silent,
        writer=writer,
        ways=("word", "thinking"),
        limit=4,
    )
    assert [(row.way, row.n, round(row.right.value * 4)) for row in result.written] == [
        ("scoring", 4, 1),  # questions 1 to 4, of which the first place is right in the last
        ("word", 4, 1),
        ("thinking", 4, 1),
    ]
    assert len(writer.seen) == 8 and not any("Question 0:" in prompt for prompt, _ in writer.seen)
    assert all(("<|im_start|>" in prompt) == (way == "word") for prompt, way in writer.seen)


async def test_a_server_that_cannot_write_takes_nothing_from_what_was_scored() -> None:
    class Slow(Writer):
        async def write(self, prompt: str, words: Sequence[str], way: Way) -> Written:
            if way == "json":
                raise EngineUnavailable("no whole answer within 120 s")
            return await super().write(prompt, words, way)

    engine = FirstPlace()
    asked = await put_choices(choices(4), None, engine, Sent())
    result = await evaluate_choices(
        asked,
        engine,
        at_once=2,
        seed=1,
        clock=Clock(),
        sleep=no_sleep,
        start=silent,
        writer=Slow(),
        ways=("word", "json", "thinking"),
        limit=2,
    )
    assert len(result.answered) == 4
    assert [row.way for row in result.written] == ["scoring", "word", "thinking"]
    assert result.unwritten == (("json", "no whole answer within 120 s"),)


async def test_a_real_model_answers_all_of_them_and_the_same_when_asked_again() -> None:
    if importlib.util.find_spec("xllamacpp") is None and not os.environ.get("CI"):
        pytest.skip("the extra `embedded` is not installed")
    engine = LlamaCppEngine(threads=1, context_tokens=512)
    try:
        asked = await put_choices(load_choices(OWN)[13:15], None, engine, Sent())
        result = await evaluate_choices(asked, engine, at_once=2, seed=1, clock=Clock(), sleep=no_sleep, start=silent)
    finally:
        await engine.aclose()
    assert len(result.answered) == 2 and result.partial == 0 and not result.unscored
    assert all(1 / row.options <= row.confidence <= 1 and 0 < row.mass <= 1 for row in result.answered)
    assert sum(place.predicted for place in result.places) == sum(place.labelled for place in result.places) == 2
    assert result.flips[0].flips == 0
