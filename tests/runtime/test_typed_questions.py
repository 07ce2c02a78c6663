"""TypedQuestions: made ready once, for everybody who asks the same, and forgotten in the end."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson
import pytest

from tests.core.test_systemone import tokenize
from tests.servers.redis_server import free_port
from worker.core.systemone import TypedQuestion, parse_request
from worker.errors import EngineUnavailable, TooLong
from worker.runtime.decide_server import DecideServer
from worker.runtime.http_edge import ServeLimits
from worker.runtime.journal import Journal
from worker.runtime.typed_questions import Crowded, TypedQuestions
from worker.telemetry import Metrics


def question(*options: str) -> TypedQuestion:
    asked = {"q": {"type": "choice", "criteria": dict.fromkeys(options)}}
    return parse_request(orjson.dumps({"model": "m", "state": "x", "questions": asked}), 100_000).questions["q"]


class Tokenizer:
    """Counts its calls, and fails while it is told to."""

    def __init__(self, calls_s: float = 0) -> None:
        self.calls = 0
        self.away = False
        self._calls_s = calls_s

    async def __call__(self, texts: Any) -> list[list[int]]:
        self.calls += 1
        await asyncio.sleep(self._calls_s)
        if self.away:
            raise EngineUnavailable("away")
        return await tokenize(texts)


def typed(
    tokenizer: Tokenizer, *, most_kept: int = 8, most_under_way: int = 256, context_tokens: int = 10_000
) -> TypedQuestions:
    return TypedQuestions(
        turns=None,
        tokenize=tokenizer,
        context_tokens=context_tokens,
        make_router=lambda rule_set, primitive: (rule_set, primitive),  # type: ignore[arg-type,return-value]
        most_kept=most_kept,
        most_under_way=most_under_way,
    )


async def test_equal_questions_are_made_ready_once_even_at_the_same_time() -> None:
    tokenizer = Tokenizer()
    questions = typed(tokenizer)
    found = await asyncio.gather(*(questions.prepared(question("a", "b"), "one") for _ in range(20)))
    calls = tokenizer.calls
    assert len({id(each) for each in found}) == 1
    assert await questions.prepared(question("a", "b"), "one") is found[0]
    assert tokenizer.calls == calls


async def test_who_goes_away_does_not_take_the_question_from_the_others() -> None:
    questions = typed(Tokenizer())
    gone, stays = (asyncio.create_task(questions.prepared(question("a", "b"), "one")) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    assert (await stays).tokens > 0
    assert gone.cancelled()


async def test_a_failure_is_not_kept() -> None:
    tokenizer = Tokenizer()
    questions = typed(tokenizer)
    tokenizer.away = True
    with pytest.raises(EngineUnavailable):
        await questions.prepared(question("a", "b"), "one")
    tokenizer.away = False
    assert (await questions.prepared(question("a", "b"), "one")).tokens > 0


async def test_only_the_last_questions_are_kept() -> None:
    tokenizer = Tokenizer()
    questions = typed(tokenizer, most_kept=2)
    first = await questions.prepared(question("a", "b"), "one")
    for name in "cde":
        await questions.prepared(question("a", name), "one")
    assert await questions.prepared(question("a", "b"), "one") is not first


async def test_a_question_that_leaves_no_room_is_refused_before_its_labels_are_tried() -> None:
    tokenizer = Tokenizer()
    with pytest.raises(TooLong):
        await typed(tokenizer, context_tokens=20).prepared(question(*(f"Queue {n}" for n in range(200))), "one")
    assert tokenizer.calls == 1


def asked_for(questions: TypedQuestions, request: str, count: int) -> list[asyncio.Task[Any]]:
    """So many questions of one request, each a task."""
    return [asyncio.create_task(questions.prepared(question(request, f"{n}"), request)) for n in range(count)]


async def given_up(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_nothing_is_made_ready_for_requests_that_were_given_up() -> None:
    tokenizer = Tokenizer(0.01)
    questions = typed(tokenizer)
    await questions.prepared(question("a", "b"), "alone")
    alone = tokenizer.calls
    for n in range(5):
        tasks = asked_for(questions, f"given up {n}", 64)
        await asyncio.sleep(0)
        await given_up(tasks)
    assert questions.under_way == 0
    before = tokenizer.calls
    await questions.prepared(question("a", "c"), "later")
    assert tokenizer.calls - before == alone


async def test_requests_take_turns_whatever_they_bring() -> None:
    tokenizer = Tokenizer(0.001)
    questions = typed(tokenizer)
    many = asked_for(questions, "many", 40)
    await asyncio.sleep(0)
    await questions.prepared(question("a", "b"), "one")
    assert sum(task.done() for task in many) <= 4
    await given_up(many)


async def test_who_waits_for_anothers_question_has_its_turn_with_its_own_request() -> None:
    questions = typed(Tokenizer(0.001))
    many = asked_for(questions, "many", 40)
    await asyncio.sleep(0)
    await questions.prepared(question("many", "39"), "one")
    assert sum(task.done() for task in many) <= 5
    await given_up(many[:-1])
    await many[-1]


async def test_beyond_the_bound_a_request_brings_one_question_and_no_other() -> None:
    questions = typed(Tokenizer(0.001), most_under_way=10)
    many = asked_for(questions, "many", 40)
    await asyncio.sleep(0)
    assert questions.under_way == 10
    second = asked_for(questions, "second", 2)
    assert (await second[0]).tokens > 0
    with pytest.raises(Crowded):
        await second[1]
    found = await asyncio.gather(*many, return_exceptions=True)
    assert sum(isinstance(each, Crowded) for each in found) == 30
    assert (await asyncio.gather(*asked_for(questions, "later", 8)))[7].tokens > 0


async def test_a_question_given_up_and_asked_again_is_made_ready_anew() -> None:
    questions = typed(Tokenizer(0.001))
    gone = asked_for(questions, "first", 1)
    await asyncio.sleep(0)
    await given_up(gone)
    assert (await questions.prepared(question("first", "0"), "again")).tokens > 0


async def test_whoever_waits_when_it_closes_waits_no_longer() -> None:
    questions = typed(Tokenizer(3600))
    many = asked_for(questions, "many", 5)
    await asyncio.sleep(0)
    await questions.aclose()
    found = await asyncio.gather(*many, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in found)
    assert questions.under_way == 0


def server_of(questions: TypedQuestions, pool: object = None) -> DecideServer:
    return DecideServer(
        rule_set=None,  # type: ignore[arg-type]  # these paths ask none of these
        router=None,  # type: ignore[arg-type]
        outputs=None,  # type: ignore[arg-type]
        pool=pool,  # type: ignore[arg-type]
        typed=questions,
        model="m",
        limits=ServeLimits(),
        token=None,
        journal=Journal(Metrics(), log_ticket_text=False),
        clock=time.monotonic,
        now=lambda: datetime.now(UTC),
    )


async def test_it_is_not_ready_before_its_port_is_open() -> None:
    """The health port answers from the start."""
    server = server_of(typed(Tokenizer(0.01)), SimpleNamespace(is_up=True, trouble=None, alarm=None))
    assert not server.status().ready
    assert server.status().why_not() == "its port is not open yet"
    port = free_port()
    running = asyncio.create_task(server.run("127.0.0.1", port))
    await address(port)
    assert server.status().ready
    server.stop()
    await running
    assert server.status().why_not() == "draining"


async def test_a_request_beyond_the_bound_is_told_to_come_again_and_leaves_nothing_behind() -> None:
    questions = typed(Tokenizer(0.01), most_under_way=1)
    server = server_of(questions)
    port = free_port()
    running = asyncio.create_task(server.run("127.0.0.1", port))
    body = {
        "model": "m",
        "state": "x",
        "questions": {f"q{n}": {"type": "noul", "instructions": f"{n}?"} for n in "abcd"},
    }
    try:
        async with aiohttp.ClientSession() as client, client.post(await address(port), json=body) as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "1"
            assert (await answer.json())["detail"]["error_type"] == "busy"
        assert questions.under_way == 0
    finally:
        server.stop()
        await running


async def address(port: int) -> str:
    """Of a server that begins to listen in a moment."""
    for _ in range(1_000):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.01)
        else:
            writer.close()
            return f"http://127.0.0.1:{port}/v1/systemone"
    raise AssertionError("nothing listens")
