"""Every way in which an SGLang server was seen or can be told to misbehave, and the error that each one is."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import email.utils
import json
import os
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.servers.stub_engine import BAD_BODIES, BAD_TRANSPORT, FAULTS, StubEngine, gzip_bomb, tokenize
from tests.waiting import until
from worker.adapters.sglang import SGLangEngine
from worker.core.scores import ScoreRequest
from worker.errors import (
    ConfigError,
    EngineDropped,
    EngineUnavailable,
    InvalidAnswer,
    RequestRefused,
    RouterError,
    TooLong,
)

DEADLINE_S = 0.6
SLACK_S = 10.0
"""By how much a loaded machine may be late."""
LABELS = tuple(tokenize(f" {letter}", add_bos=False)[0] for letter in "ABC")
SECRET_TEXT = "Kim Min-ji lives at 12 Secret Street"
KEY = "sk-very-secret"
REQUESTS = [
    ScoreRequest("Sort the ticket.\nTicket:", f" {text}\nAnswer:", LABELS)
    for text in (SECRET_TEXT, "please refund me", "the app crashes")
]
ANSWERS = {
    answer["name"]: answer
    for answer in json.loads((Path(__file__).parent / "engine_recordings" / "sglang_0_5_23_answers.json").read_text())[
        "answers"
    ]
}

TRANSPORT_ERRORS: dict[str, type[RouterError]] = {
    "hang": EngineUnavailable,
    "hang_unread": EngineUnavailable,
    "half_answer": EngineUnavailable,
    "slow_loris": EngineUnavailable,
    "slow_headers": EngineUnavailable,
    "redirect": EngineUnavailable,
    "close": EngineDropped,
    "reset": EngineDropped,
    "truncated": EngineDropped,
    "reset_in_body": EngineDropped,
    "content_length_long": EngineDropped,
    "content_length_short": InvalidAnswer,
    "not_http": InvalidAnswer,
    "gzip_bomb": InvalidAnswer,
}
ENDED_BY_THE_DEADLINE = {"hang", "hang_unread", "half_answer", "slow_loris", "slow_headers"}
UNSEEN = {"swapped_rows"}
ONLY_LOGPROBS = {"flat_rows", "mass_above_one"}


@pytest.fixture
async def stub() -> AsyncIterator[StubEngine]:
    async with StubEngine() as server:
        yield server


@contextlib.asynccontextmanager
async def engine_on(url: str, **options: Any) -> AsyncIterator[SGLangEngine]:
    """With time for what is answered, since the machine may be busy."""
    engine = SGLangEngine(url, **{"timeout_s": 20.0, "control_timeout_s": 20.0, **options})
    try:
        yield engine
    finally:
        await engine.aclose()


@contextlib.contextmanager
def stub_process(*arguments: str) -> Iterator[str]:
    command = [sys.executable, "-m", "tests.servers.stub_engine", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def test_every_fault_of_the_stub_has_its_error() -> None:
    assert set(TRANSPORT_ERRORS) == set(BAD_TRANSPORT)
    assert set(FAULTS) == {"none", "status", "canned", *BAD_TRANSPORT, *BAD_BODIES}


@pytest.mark.parametrize("fault", BAD_TRANSPORT)
async def test_a_broken_exchange_is_its_error_within_the_deadline(stub: StubEngine, fault: str) -> None:
    gzip_bomb()  # made once, by and by, in this process
    stub.behaviour.fault = fault
    stub.behaviour.times = 1
    async with engine_on(stub.url, timeout_s=DEADLINE_S if fault in ENDED_BY_THE_DEADLINE else 20.0) as engine:
        started = time.perf_counter()
        with pytest.raises(TRANSPORT_ERRORS[fault]):
            await engine.score(REQUESTS)
        assert time.perf_counter() - started < DEADLINE_S + SLACK_S  # a slow-loris would take half a minute
        # ... and the engine is none the worse for it.
        for _ in range(3):
            assert len(await engine.score(REQUESTS)) == len(REQUESTS)


@pytest.mark.parametrize(
    ("fault", "with_logprobs"),
    [(fault, True) for fault in BAD_BODIES if fault not in UNSEEN]
    + [(fault, False) for fault in BAD_BODIES if fault not in UNSEEN | ONLY_LOGPROBS],
)
async def test_a_bad_answer_is_refused_whole(stub: StubEngine, fault: str, with_logprobs: bool) -> None:
    stub.behaviour.fault = fault
    stub.behaviour.token_logprobs = with_logprobs
    async with engine_on(stub.url) as engine:
        with pytest.raises(InvalidAnswer):
            await engine.score(REQUESTS)


async def test_a_probability_of_zero_has_no_logarithm(stub: StubEngine) -> None:
    stub.behaviour.fault, stub.behaviour.token_logprobs = "all_zero", False
    async with engine_on(stub.url) as engine:
        with pytest.raises(InvalidAnswer, match="not above 0"):
            await engine.score(REQUESTS)


async def test_a_compressed_answer_is_not_even_read(stub: StubEngine) -> None:
    gzip_bomb()
    stub.behaviour.fault = "gzip_bomb"
    async with engine_on(stub.url) as engine:
        with pytest.raises(InvalidAnswer, match="compressed"):
            await engine.score(REQUESTS)


async def test_rows_in_swapped_order_cannot_be_seen_in_an_answer(stub: StubEngine) -> None:
    """Why known tickets are slipped in as canaries elsewhere."""
    async with engine_on(stub.url) as engine:
        right = await engine.score(REQUESTS)
        stub.behaviour.fault = "swapped_rows"
        assert list(await engine.score(REQUESTS)) == list(right)[::-1]


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 408])
async def test_a_server_in_trouble_is_unavailable(stub: StubEngine, status: int) -> None:
    stub.behaviour.fault, stub.behaviour.status = "status", status
    async with engine_on(stub.url) as engine:
        with pytest.raises(EngineUnavailable) as caught:
            await engine.score(REQUESTS)
        assert caught.value.retry_after_s is None


NOW = datetime.datetime(2026, 3, 1, 12, 0, 0, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("0", 0.0),
        (email.utils.format_datetime(NOW + datetime.timedelta(seconds=90), usegmt=True), 90.0),
        (email.utils.format_datetime(NOW - datetime.timedelta(seconds=90), usegmt=True), 0.0),
        ("-3", None),
        ("soon", None),
        ("1e9", None),
        ("9" * 400, None),
        ("", None),
    ],
)
async def test_retry_after_is_understood_in_seconds_and_as_a_date(
    stub: StubEngine, header: str, seconds: float | None
) -> None:
    stub.behaviour.fault, stub.behaviour.status, stub.behaviour.retry_after = "status", 503, header
    async with engine_on(stub.url, now=NOW.timestamp) as engine:
        with pytest.raises(EngineUnavailable) as caught:
            await engine.score(REQUESTS)
        assert caught.value.retry_after_s == seconds


RECORDED_ERRORS: dict[str, type[RouterError]] = {
    "auth_missing": EngineUnavailable,
    "auth_wrong": EngineUnavailable,
    "not_found": EngineUnavailable,
    "err_get_method": EngineUnavailable,
    "router_v1_score": EngineUnavailable,
    "overload_queue_full": EngineUnavailable,
    "waiting_timeout": EngineUnavailable,
    "err_bad_json": RequestRefused,
    "err_lone_surrogate": RequestRefused,
    "err_content_type": RequestRefused,
    "err_label_out_of_vocab": RequestRefused,
    "err_label_duplicate": RequestRefused,
    "err_label_negative": RequestRefused,
    "err_empty_labels": RequestRefused,
    "err_prompt_too_long": TooLong,
    "err_prompt_too_long_one_of_batch": TooLong,
    "err_prompt_4090_tokens": TooLong,
    "err_empty_items": InvalidAnswer,
}


@pytest.mark.parametrize("name", RECORDED_ERRORS)
async def test_what_sglang_was_seen_to_answer_is_its_error(stub: StubEngine, name: str) -> None:
    stub.behaviour.fault, stub.behaviour.canned = "canned", ANSWERS[name]
    async with engine_on(stub.url) as engine:
        with pytest.raises(RECORDED_ERRORS[name]):
            await engine.score(REQUESTS[:1])


@pytest.mark.parametrize(("name", "tokens"), [("err_prompt_too_long", 5002), ("err_prompt_4090_tokens", 4090)])
async def test_too_long_says_how_long_and_what_fits(stub: StubEngine, name: str, tokens: int) -> None:
    stub.behaviour.fault, stub.behaviour.canned = "canned", ANSWERS[name]
    async with engine_on(stub.url) as engine:
        with pytest.raises(TooLong) as caught:
            await engine.score(REQUESTS[:1])
        assert (caught.value.tokens, caught.value.limit) == (tokens, 4089)
        with pytest.raises(RequestRefused):  # whose prompt it was is not said
            await engine.score(REQUESTS)


async def test_recorded_scores_are_read_as_log_probabilities(stub: StubEngine) -> None:
    labels = (562, 603, 565, 622, 645, 633, 667, 640)
    request = ScoreRequest("x", "", labels)
    read = {}
    async with engine_on(stub.url) as engine:
        for name in ("score_no_softmax", "score_return_token_logprobs", "fp32_lm_head_logprobs"):
            stub.behaviour.fault, stub.behaviour.canned = "canned", ANSWERS[name]
            (read[name],) = await engine.score([request])
    assert read["score_return_token_logprobs"].logprobs[1] == -3.0484724044799805
    assert read["score_return_token_logprobs"].mass == pytest.approx(0.1515, abs=1e-4)
    # What an older server answers means the same.
    assert read["score_no_softmax"].logprobs == pytest.approx(read["score_return_token_logprobs"].logprobs, abs=1e-6)
    assert read["fp32_lm_head_logprobs"].mass == pytest.approx(0.1583, abs=1e-4)


async def test_a_server_without_token_logprobs_gives_the_same_scores(stub: StubEngine) -> None:
    async with engine_on(stub.url) as engine:
        newer = await engine.score(REQUESTS)
        stub.behaviour.token_logprobs = False
        older = await engine.score(REQUESTS)
    for one, other in zip(newer, older, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-9)


async def test_a_wrong_key_blames_the_set_up_and_no_ticket(stub: StubEngine) -> None:
    stub.behaviour.api_key = KEY
    async with engine_on(stub.url, api_key=KEY) as engine:
        assert len(await engine.score(REQUESTS)) == len(REQUESTS)
        assert (await engine.identity()).engine == "sglang"
    for options in ({}, {"api_key": "another"}):
        async with engine_on(stub.url, **options) as engine:
            with pytest.raises(EngineUnavailable, match="API key"):
                await engine.score(REQUESTS)
            with pytest.raises(ConfigError, match="API key"):
                await engine.identity()


async def test_redirects_are_never_followed(stub: StubEngine) -> None:
    stub.behaviour.fault = "redirect"
    async with engine_on(stub.url) as engine:
        with pytest.raises(EngineUnavailable, match="redirects"):
            await engine.score(REQUESTS)
    assert stub.counters.paths == {"/v1/score": 1}


async def test_a_poison_ticket_can_be_found_by_halving(stub: StubEngine) -> None:
    stub.behaviour.poison = "poison"
    poisoned = [*REQUESTS, ScoreRequest(REQUESTS[0].prefix, " poison\nAnswer:", LABELS)]
    async with engine_on(stub.url) as engine:
        for part, error in ((poisoned, EngineDropped), (poisoned[2:], EngineDropped), (poisoned[3:], EngineDropped)):
            with pytest.raises(error):
                await engine.score(part)
        assert len(await engine.score(poisoned[:2])) == 2
        assert len(await engine.score(poisoned[2:3])) == 1


@pytest.mark.parametrize("fault", ["close", "redirect", "html", "not_http", "status", "canned", "gzip_bomb", "hang"])
async def test_no_error_tells_ticket_text_address_or_key(stub: StubEngine, fault: str) -> None:
    """Not even the traceback with all its causes, since that is what gets logged."""
    stub.behaviour.fault, stub.behaviour.status = fault, 500
    stub.behaviour.canned = {
        "status": 400,
        "answer": {"message": f"bad item {SECRET_TEXT} in File /srv/sglang/http_server.py {stub.url} {KEY}"},
    }
    async with engine_on(stub.url, api_key=KEY, timeout_s=DEADLINE_S if fault == "hang" else 20.0) as engine:
        with pytest.raises(RouterError) as caught:
            await engine.score(REQUESTS)
    told = "".join(traceback.format_exception(caught.value))
    told = "\n".join(line for line in told.splitlines() if not line.startswith(("  File", "    ")))
    for secret in (SECRET_TEXT, "Secret", KEY, "127.0.0.1", str(stub.port), "/srv/", "http_server"):
        assert secret not in told
    assert KEY not in repr(engine)


async def test_a_server_that_is_not_there_is_unavailable(stub: StubEngine) -> None:
    await stub.stop()
    async with engine_on(stub.url) as engine:
        for call in (engine.probe, engine.identity, lambda: engine.score(REQUESTS)):
            with pytest.raises(EngineUnavailable, match="cannot connect") as caught:
                await call()
            assert str(stub.port) not in "".join(traceback.format_exception(caught.value))
        await stub.start()
        await engine.probe()


async def test_a_restarted_server_is_found_again(stub: StubEngine) -> None:
    async with engine_on(stub.url) as engine:
        await engine.score(REQUESTS)
        await stub.stop()
        await stub.start()
        for _ in range(2):
            with contextlib.suppress(EngineDropped):  # the old connection may be met once
                await engine.score(REQUESTS)
        assert len(await engine.score(REQUESTS)) == len(REQUESTS)


@pytest.mark.parametrize("fault", ["gzip_bomb", "huge"])
async def test_memory_stays_bounded_whatever_is_answered(fault: str) -> None:
    with stub_process("--fault", fault) as url:
        async with engine_on(url, timeout_s=30.0) as engine:
            with contextlib.suppress(InvalidAnswer):
                await engine.score(REQUESTS)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for _ in range(5):
                with pytest.raises(InvalidAnswer):
                    await engine.score(REQUESTS)
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 * 1024  # KiB


async def test_many_requests_at_once_share_few_connections(stub: StubEngine) -> None:
    stub.behaviour.latency_s = 0.005
    async with engine_on(stub.url, connections=4, timeout_s=30.0) as engine:
        loop = asyncio.get_running_loop()
        calls = [loop.create_task(engine.score(REQUESTS[:1])) for _ in range(256)]
        for call in calls:
            await call
    assert stub.counters.answered == 256
    assert stub.counters.most_in_flight == stub.counters.connections == 4


async def test_the_deadline_counts_the_wait_for_a_connection(stub: StubEngine) -> None:
    stub.behaviour.fault = "hang"
    async with engine_on(stub.url, connections=1, timeout_s=DEADLINE_S) as engine:
        loop = asyncio.get_running_loop()
        started = time.perf_counter()
        calls = [loop.create_task(engine.score(REQUESTS)) for _ in range(40)]
        for call in calls:
            with pytest.raises(EngineUnavailable):
                await call
        assert time.perf_counter() - started < DEADLINE_S + SLACK_S  # one after another: forty deadlines


async def test_a_cancelled_call_gives_its_connection_up(stub: StubEngine) -> None:
    stub.behaviour.latency_s = 60.0
    async with engine_on(stub.url, connections=1) as engine:
        call = asyncio.get_running_loop().create_task(engine.score(REQUESTS))
        await until(lambda: stub.counters.in_flight == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        stub.behaviour.latency_s = 0.0
        assert len(await engine.score(REQUESTS)) == len(REQUESTS)


@pytest.mark.parametrize("older", [False, True], ids=["now", "older"])
async def test_identity_and_probe_work_with_newer_and_older_paths(stub: StubEngine, older: bool) -> None:
    stub.behaviour.has_ready = not older
    async with engine_on(stub.url) as engine:
        identity = await engine.identity()
        await engine.probe()
        assert identity.context_tokens == stub.behaviour.context_tokens
        assert identity.model == "stub (stub) weights=default dtype=float32"
        assert identity.notes == ()
        stub.behaviour.ready = False
        with pytest.raises(EngineUnavailable):
            await engine.probe()


async def test_a_server_that_truncates_prompts_is_refused(stub: StubEngine) -> None:
    stub.behaviour.auto_truncate = True
    async with engine_on(stub.url) as engine:
        with pytest.raises(ConfigError, match="allow-auto-truncate"):
            await engine.identity()


async def test_identity_of_something_that_is_no_sglang_is_a_config_error(stub: StubEngine) -> None:
    stub.behaviour.fault, stub.behaviour.canned = "canned", {"status": 200, "answer": "<html>"}
    async with engine_on(stub.url) as engine:
        with pytest.raises(ConfigError, match="no SGLang server"):
            await engine.identity()
    async with engine_on(f"{stub.url}/elsewhere") as engine:
        with pytest.raises(ConfigError, match="base URL"):
            await engine.identity()


@pytest.mark.parametrize(
    "url",
    ["", "localhost:30000", "ftp://host", "http://", "http://user:pw@host", "http://host?x=1", "http://host:notaport"],
)
def test_an_address_that_cannot_be_right_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SGLangEngine(url)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize("key", ["", "with space", "line\nbreak", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_a_config_error(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SGLangEngine("http://host:1", api_key=key)
    assert not key or key not in str(caught.value)


async def test_no_proxy_is_taken_from_the_environment(stub: StubEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setitem(os.environ, name, "http://127.0.0.1:1")
    async with engine_on(stub.url) as engine:
        assert len(await engine.score(REQUESTS)) == len(REQUESTS)


async def test_the_stub_runs_as_a_process_and_can_be_told_what_to_do() -> None:
    with stub_process("--keywords", '{"refund": " C"}') as url:
        async with engine_on(url) as engine, httpx.AsyncClient(base_url=url, trust_env=False) as client:
            scores = await engine.score(REQUESTS)
            assert scores[1].logprobs.index(max(scores[1].logprobs)) == 2
            await client.post("/_stub", json={"fault": "close"})
            with pytest.raises(EngineDropped):
                await engine.score(REQUESTS)
            told = (await client.get("/_stub")).json()["counters"]
            assert (told["requests"], told["items"], told["faults"]) == (2, 6, 1)
            assert (await client.post("/_stub", json={"colour": "red"})).status_code == 400


async def test_the_stub_spreads_a_share_of_faults_evenly(stub: StubEngine) -> None:
    stub.behaviour.fault, stub.behaviour.share = "status", 0.3
    failed = 0
    async with engine_on(stub.url) as engine:
        for _ in range(20):
            try:
                await engine.score(REQUESTS)
            except EngineUnavailable:
                failed += 1
    assert failed == 6
