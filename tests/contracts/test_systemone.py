"""A decision API as an engine: the distribution is read, and nothing that calls itself confidence."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.core.sets import category_set
from tests.servers.stub_engine import read_body, read_head, respond
from worker.adapters.systemone import SystemOneEngine
from worker.core.labels import choose_labels
from worker.core.scores import ScoreRequest
from worker.errors import ConfigError, EngineUnavailable, InvalidAnswer, RequestRefused

WORDS = ("billing", "login", "bug")


class DecisionStub:
    """Speaks both dialects; the probabilities are what the test says."""

    def __init__(self) -> None:
        self.dialect = "systemone"
        self.probabilities = [0.7, 0.2, 0.1]
        self.more: dict[str, Any] = {}
        self.status, self.error = 200, {"detail": {"error_type": "x", "message": "no"}}
        self.model = "jev-1.13.0"
        self.spoil: Callable[[dict[str, Any]], object] = lambda answer: None
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def __aenter__(self) -> DecisionStub:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                _, path, headers = await read_head(reader)
                request = json.loads(await read_body(reader, headers) or b"null")
                status, answer = self._answer(path, request)
                await respond(writer, status, json.dumps(answer).encode())
        writer.close()

    def _answer(self, path: str, request: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"models": []}
        self.asked.append((path, request))
        if path != f"/v1/{self.dialect}":
            return 404, {"detail": "Not Found"}
        if self.status != 200:
            return self.status, self.error
        if self.dialect == "systemone":
            options = list(request["questions"]["q"]["criteria"])
        else:
            options = [option["name"] for option in request["questions"][0]["options"]]
        found = dict(zip(options, self.probabilities, strict=True))
        best = max(found, key=found.__getitem__)
        answer = {"type": "choice", "choice": best, "probabilities": found, "confidence": 0.123, **self.more}
        self.spoil(answer)
        return 200, {"model": self.model, "answers": {"q": answer}, "usage": {}}


@pytest.fixture
async def stub() -> AsyncIterator[DecisionStub]:
    async with DecisionStub() as server:
        yield server


@pytest.fixture
async def engine(stub: DecisionStub) -> AsyncIterator[SystemOneEngine]:
    async with contextlib.aclosing(SystemOneEngine(stub.url)) as made:
        yield made


async def labels_of(engine: SystemOneEngine, *words: str) -> tuple[int, ...]:
    return tuple(ids[-1] for ids in await engine.tokenize([f"Answer: {word}" for word in words or WORDS]))


async def asked(engine: SystemOneEngine, *words: str) -> ScoreRequest:
    return ScoreRequest(
        "Sort the tickets.\n\nTicket:", " I was charged twice.\nAnswer:", await labels_of(engine, *words)
    )


async def test_the_distribution_is_read_and_never_the_confidence(stub: DecisionStub, engine: SystemOneEngine) -> None:
    (row,) = await engine.score([await asked(engine)])
    assert row.logprobs == pytest.approx([math.log(p) for p in (0.7, 0.2, 0.1)])
    assert (row.mass, row.unknown) == (pytest.approx(1.0), ())
    ((path, request),) = stub.asked
    assert path == "/v1/systemone"
    assert request == {
        "model": "jev-latest",
        "state": "I was charged twice.\nAnswer:",
        "questions": {
            "q": {
                "type": "choice",
                "instructions": "Sort the tickets.\n\nTicket:",
                "criteria": {"billing": None, "login": None, "bug": None},
            }
        },
    }


async def test_a_probability_rounded_to_nothing_is_an_unknown_label(
    stub: DecisionStub, engine: SystemOneEngine
) -> None:
    for shown, bound in (([0.97, 0.03, 0.0], 0.005), ([0.9412, 0.0588, 0.0], 0.00005), ([1.0, 0.0, 0.0], 0.005)):
        stub.probabilities = shown
        (row,) = await engine.score([await asked(engine)])
        assert row.unknown == tuple(place for place, p in enumerate(shown) if p == 0.0)
        assert row.bound == pytest.approx(math.log(bound))


async def test_sglangs_own_decisions_are_spoken_too_and_their_label_mass_counts(
    stub: DecisionStub, engine: SystemOneEngine
) -> None:
    stub.dialect, stub.more = "decisions", {"label_mass": 0.04}
    (row,) = await engine.score([await asked(engine)])
    assert row.mass == pytest.approx(0.04)
    assert row.logprobs[0] == pytest.approx(math.log(0.7 * 0.04))
    await engine.score([await asked(engine)])
    assert [path for path, _ in stub.asked] == ["/v1/systemone", "/v1/decisions", "/v1/decisions"]
    assert stub.asked[1][1]["questions"][0]["options"] == [{"name": word} for word in WORDS]
    assert "api=decisions" in (await engine.identity()).model


async def test_the_labels_of_a_category_set_are_found_as_with_any_engine(engine: SystemOneEngine) -> None:
    prompt, labels = await choose_labels(category_set("billing", "login", "bug"), engine.tokenize)
    assert labels.words == WORDS
    another = SystemOneEngine("http://127.0.0.1:1")  # that never saw these words
    with pytest.raises(EngineUnavailable, match="cannot connect"):
        await another.score([ScoreRequest(prompt.prefix, prompt.item("x"), labels.token_ids)])
    await another.aclose()


async def test_korean_and_spaced_words_survive_the_way_to_an_option(
    stub: DecisionStub, engine: SystemOneEngine
) -> None:
    await engine.score([await asked(engine, "도로", "환경", "기타")])
    assert list(stub.asked[0][1]["questions"]["q"]["criteria"]) == ["도로", "환경", "기타"]


@pytest.mark.parametrize("count", [1, 256])
async def test_too_few_or_too_many_options_are_refused(engine: SystemOneEngine, count: int) -> None:
    with pytest.raises(RequestRefused, match="2 to 255"):
        await engine.score([await asked(engine, *(f"w{number}" for number in range(count)))])


async def test_token_ids_are_refused(engine: SystemOneEngine) -> None:
    with pytest.raises(RequestRefused, match="text"):
        await engine.score([ScoreRequest((2, 3), (4,), await labels_of(engine))])
    with pytest.raises(RequestRefused, match="no word"):
        await engine.score([ScoreRequest("a", "b", (562, 603))])


SPOILT: dict[str, Callable[[dict[str, Any]], object]] = {
    "none": lambda answer: answer.pop("probabilities"),
    "a list": lambda answer: answer.update(probabilities=[0.7, 0.2, 0.1]),
    "one missing": lambda answer: answer["probabilities"].pop("bug"),
    "one more": lambda answer: answer["probabilities"].update(other=0.0),
    "another case": lambda answer: answer.update(probabilities={"Billing": 0.7, "login": 0.2, "bug": 0.1}),
    "text": lambda answer: answer["probabilities"].update(bug="0.1"),
    "boolean": lambda answer: answer["probabilities"].update(bug=True),
    "negative": lambda answer: answer["probabilities"].update(bug=-0.1),
    "sum": lambda answer: answer["probabilities"].update(bug=0.3),
    "mass": lambda answer: answer.update(label_mass=0.0),
}


@pytest.mark.parametrize("name", SPOILT)
async def test_a_bad_answer_is_refused(stub: DecisionStub, engine: SystemOneEngine, name: str) -> None:
    stub.spoil = SPOILT[name]
    with pytest.raises(InvalidAnswer):
        await engine.score([await asked(engine)])


async def test_another_model_behind_the_alias_is_another_identity(stub: DecisionStub, engine: SystemOneEngine) -> None:
    before = await engine.identity()
    assert before.model == "jev-1.13.0 api=systemone"
    assert before == await engine.identity()
    stub.model = "jev-1.14.0"
    assert (await engine.identity()).model != before.model
    await engine.probe()


@pytest.mark.parametrize(
    ("status", "error"),
    [(501, EngineUnavailable), (401, EngineUnavailable), (529, EngineUnavailable), (422, RequestRefused)],
)
async def test_what_the_api_refuses_is_its_error(
    stub: DecisionStub, engine: SystemOneEngine, status: int, error: type[Exception]
) -> None:
    stub.status = status
    with pytest.raises(error):
        await engine.score([await asked(engine)])
    if status in (501, 401, 422):
        with pytest.raises(ConfigError):
            await engine.identity()
