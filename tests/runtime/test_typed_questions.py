"""TypedQuestions: made ready once, for everybody who asks the same, and forgotten in the end."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from tests.core.test_systemone import tokenize
from worker.core.systemone import TypedQuestion, parse_request
from worker.errors import EngineUnavailable, TooLong
from worker.runtime.typed_questions import TypedQuestions


def question(*options: str) -> TypedQuestion:
    asked = {"q": {"type": "choice", "criteria": dict.fromkeys(options)}}
    return parse_request(orjson.dumps({"model": "m", "state": "x", "questions": asked}), 100_000).questions["q"]


class Tokenizer:
    """Counts its calls, and fails while it is told to."""

    def __init__(self) -> None:
        self.calls = 0
        self.away = False

    async def __call__(self, texts: Any) -> list[list[int]]:
        self.calls += 1
        await asyncio.sleep(0)
        if self.away:
            raise EngineUnavailable("away")
        return await tokenize(texts)


def typed(tokenizer: Tokenizer, *, most_kept: int = 8, context_tokens: int = 10_000) -> TypedQuestions:
    return TypedQuestions(
        turns=None,
        tokenize=tokenizer,
        context_tokens=context_tokens,
        make_router=lambda rule_set, primitive: (rule_set, primitive),  # type: ignore[arg-type,return-value]
        most_kept=most_kept,
    )


async def test_equal_questions_are_made_ready_once_even_at_the_same_time() -> None:
    tokenizer = Tokenizer()
    questions = typed(tokenizer)
    found = await asyncio.gather(*(questions.prepared(question("a", "b")) for _ in range(20)))
    calls = tokenizer.calls
    assert len({id(each) for each in found}) == 1
    assert await questions.prepared(question("a", "b")) is found[0]
    assert tokenizer.calls == calls


async def test_who_goes_away_does_not_take_the_question_from_the_others() -> None:
    questions = typed(Tokenizer())
    gone, stays = (asyncio.create_task(questions.prepared(question("a", "b"))) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    assert (await stays).tokens > 0
    assert gone.cancelled()


async def test_a_failure_is_not_kept() -> None:
    tokenizer = Tokenizer()
    questions = typed(tokenizer)
    tokenizer.away = True
    with pytest.raises(EngineUnavailable):
        await questions.prepared(question("a", "b"))
    tokenizer.away = False
    assert (await questions.prepared(question("a", "b"))).tokens > 0


async def test_only_the_last_questions_are_kept() -> None:
    tokenizer = Tokenizer()
    questions = typed(tokenizer, most_kept=2)
    first = await questions.prepared(question("a", "b"))
    for name in "cde":
        await questions.prepared(question("a", name))
    assert await questions.prepared(question("a", "b")) is not first


async def test_a_question_that_leaves_no_room_is_refused_before_its_labels_are_tried() -> None:
    tokenizer = Tokenizer()
    with pytest.raises(TooLong):
        await typed(tokenizer, context_tokens=20).prepared(question(*(f"Queue {n}" for n in range(200))))
    assert tokenizer.calls == 1
