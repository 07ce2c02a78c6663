"""Engines that ask for a bearer token: with it they serve; without it one is told what to set, and nobody the key.

The servers are stubs over real HTTP, which answer 401 where the token is not theirs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from tests.integration.desk import Desk, StubProcess, WorkerProcess, http
from tests.integration.secured import command, findings
from tests.servers.openai_stub import OpenAIStub
from tests.servers.stub_engine import Behaviour, StubEngine
from tests.waiting import wait_for
from worker.adapters.openai_compat import OpenAICompatEngine
from worker.adapters.sglang import SGLangEngine
from worker.errors import ConfigError, EngineError
from worker.ports import ScoringEngine

KEY = "sk-5ecret-of-the-engine"
WRONG = "sk-wr0ng-and-never-told"


@pytest.fixture
def guarded(engine: StubProcess) -> Iterator[StubProcess]:
    """The stub of the module, which asks for the key inside the test; its rules were calibrated before."""
    engine.tell(api_key=KEY)
    yield engine
    engine.tell(api_key=None)


@pytest.mark.parametrize("key", [None, WRONG, KEY.upper(), KEY[:-1]], ids=["none", "another", "case", "shorter"])
@pytest.mark.parametrize("kind", ["sglang", "openai_compat"])
async def test_without_the_right_token_nothing_is_served_and_the_setting_is_named(kind: str, key: str | None) -> None:
    async def refused(engine: ScoringEngine) -> str:
        try:
            with pytest.raises((EngineError, ConfigError), match="ROUTER_ENGINE_API_KEY") as told:
                await engine.identity()
        finally:
            await engine.aclose()
        return str(told.value)

    if kind == "sglang":
        async with StubEngine(Behaviour(api_key=KEY)) as stub:
            said = await refused(SGLangEngine(stub.url, api_key=key))
    else:
        async with OpenAIStub() as other:
            other.api_key = KEY
            said = await refused(OpenAICompatEngine(other.url, api_key=key))
            assert not other.requests
    assert "HTTP 401" in said
    assert KEY not in said
    assert key is None or key not in said


@pytest.mark.kafka
def test_check_names_the_setting_and_never_prints_a_key(desk: Desk, guarded: StubProcess) -> None:
    assert findings(desk, engine_api_key=KEY)["engine"].state == "ok"
    absent = findings(desk)["engine"]
    assert absent.state == "wrong"
    assert "ROUTER_ENGINE_API_KEY" in absent.what
    wrong = command(desk, "check", engine_api_key=WRONG)
    assert wrong.returncode == 1
    assert "ROUTER_ENGINE_API_KEY" in wrong.stdout
    assert WRONG not in wrong.stdout + wrong.stderr


@pytest.mark.kafka
def test_a_worker_with_a_wrong_key_ends_at_once_and_one_whose_key_is_changed_waits(
    desk: Desk, guarded: StubProcess
) -> None:
    """No ticket goes to people for it: nobody but an operator can mend a key."""
    wrong = WorkerProcess(desk, engine_api_key=WRONG)
    try:
        assert wrong.process.wait(120) == 2
    finally:
        wrong.kill()
    with desk.worker(engine_api_key=KEY) as worker:
        desk.wait_for_all(desk.send(1))
        guarded.tell(api_key="another-key-than-before")
        ids = desk.send(5, first=1)
        wait_for(lambda: "engine.down" in worker.log.read_text(encoding="utf-8"), "the engine to count as down", 90)
        guarded.tell(api_key=KEY)
        found = desk.wait_for_all(ids)
        assert worker.terminate() == 0
    assert not [ends for ends in found.values() if ends == [desk.rules.human_topic]]
    log = worker.log.read_text(encoding="utf-8")
    (down,) = [json.loads(line) for line in log.splitlines() if '"engine.down"' in line]
    assert "ROUTER_ENGINE_API_KEY" in down["detail"]
    said = wrong.log.read_text(encoding="utf-8")
    assert "ROUTER_ENGINE_API_KEY" in said
    assert WRONG not in said
    assert KEY not in log


def test_the_stub_asks_for_the_token_wherever_a_ticket_is_sent() -> None:
    """Else the tests above would show nothing."""

    async def status_of(path: str) -> int:
        async with StubEngine(Behaviour(api_key=KEY)) as stub:
            return (await asyncio.to_thread(http, f"{stub.url}{path}"))[0]

    assert asyncio.run(status_of("/model_info")) == 401
