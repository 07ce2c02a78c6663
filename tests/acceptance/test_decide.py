"""`ticket-router decide`: a ticket of one's own, decided as everywhere else, and shown so that one can read it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest
from pydantic import TypeAdapter

from tests.acceptance.served import COMMAND, ServeProcess, write_rules
from tests.deploy.test_without_extras import BLOCKED
from tests.integration.desk import StubProcess
from tests.test_visible_output import EVIL, obeyed
from worker.adapters.files import load_rule_set
from worker.cli.arguments import engine_settings
from worker.core.cards import card_json_schema, make_card
from worker.core.envelope import Envelope, envelope_json_schema

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
FRESH = ("decided_at", "timings")
"""What two decisions about one ticket need not share."""
FIRST = """
import sys
from worker.cli import main
sys.argv = ["ticket-router", "decide", "--rules", {folder!r}, "a text"]
main()
"""


@pytest.fixture(scope="module")
def stub() -> Iterator[StubProcess]:
    with StubProcess(latency_s=0.0) as engine:
        yield engine


@pytest.fixture(scope="module")
def folder(stub: StubProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrated for the stub, which follows the words billing, login and bug."""
    made = tmp_path_factory.mktemp("own")
    vip = {"kind": "field", "name": "vip", "pointer": "/vip", "equals": True, "then": "escalate"}
    welsh = {"kind": "language", "name": "Welsh", "any": ["cy"], "then": "escalate"}
    write_rules(made, stub.url, overrides=[vip, welsh], length={"most_tokens": 40})
    return made


def typed(
    folder: Path, *arguments: str | bytes, stdin: bytes | None = None, code: int = 0, **settings: str
) -> subprocess.CompletedProcess[bytes]:
    """Without any setting but these, and standard input at its end."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ROUTER_", "OTEL_"))}
    done = subprocess.run(
        [str(COMMAND), "decide", "--rules", str(folder), *arguments],
        env={**environment, "COLUMNS": "200", **settings},
        cwd=folder,
        input=stdin or b"",
        capture_output=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == code, (done.stdout.decode(), done.stderr.decode())
    assert b"Traceback" not in done.stderr
    return done


def decision(folder: Path, stub: StubProcess, *arguments: str | bytes, stdin: bytes | None = None) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(
        typed(folder, *arguments, "--json", stdin=stdin, ROUTER_ENGINE_URL=stub.url).stdout
    )
    jsonschema.validate(found, envelope_json_schema())
    return found


def lasting(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in FRESH}


# -- what is decided ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sglang", "llama_cpp"])
def test_it_decides_as_the_server_does_over_http(engine: str, stub: StubProcess, folder: Path, tmp_path: Path) -> None:
    settings = {"ROUTER_ENGINE": engine}
    if engine == "sglang":
        rules, url = folder, stub.url
    else:  # nothing is calibrated here, and the scores say whether the same was asked
        rules, url = tmp_path, ""
        write_rules(rules, url, calibrated=False)
    text = "a question <|im_end|> about\u200b\x07 login, 비밀번호"
    own = orjson.loads(typed(rules, text, "--json", "--id", "T-1", ROUTER_ENGINE_URL=url, **settings).stdout)
    with ServeProcess(rules, url, engine=engine) as server:
        served = server.ask("/v1/decide", {"id": "T-1", "text": text}).json
    assert own["label_scores"] is not None
    assert lasting(own) == lasting(served)


def test_people_get_the_card_of_that_decision(stub: StubProcess, folder: Path) -> None:
    text = "nothing that anybody knows"
    found = decision(folder, stub, text)
    done = typed(folder, text, "--card", ROUTER_ENGINE_URL=stub.url)
    card = orjson.loads(done.stdout)
    jsonschema.validate(card, card_json_schema())
    envelope = TypeAdapter(Envelope).validate_python(found)
    expected = orjson.loads(make_card(envelope, load_rule_set(folder)).to_bytes())
    assert found["action"] == "escalate"
    assert card["duplicates"]["known"] == 0  # that was looked for
    assert {**card, "decided_at": "", "duplicates": None} == {**expected, "decided_at": ""}
    routed = typed(folder, "about login", "--card", ROUTER_ENGINE_URL=stub.url)
    assert (routed.stdout, b"no card: the ticket goes to served.login" in routed.stderr) == (b"", True)


def test_what_rules_look_at_can_be_said(stub: StubProcess, folder: Path) -> None:
    for arguments, rule in ((("--metadata", '{"vip": true}'), "vip"), (("--language", "cy"), "Welsh")):
        found = decision(folder, stub, "about login", "--tenant", "acme", *arguments)
        (why,) = found["reasons"]
        assert (why["code"], why["values"]["name"], found["tenant"]) == ("override_escalation", rule, "acme")
        assert found["label_scores"] is None


def test_standard_input_is_read_where_no_text_is_given(stub: StubProcess, folder: Path) -> None:
    named = decision(folder, stub, "로그인이 안 돼요: login")
    for arguments in ((), ("-",)):
        assert lasting(decision(folder, stub, *arguments, stdin="로그인이 안 돼요: login\n".encode())) == lasting(named)


def test_the_embedded_model_is_asked_where_no_engine_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ROUTER_")]:
        monkeypatch.delenv(name)
    assert engine_settings(None, otherwise="llama_cpp").engine == "llama_cpp"
    assert engine_settings("openai_compat", otherwise="llama_cpp").engine == "openai_compat"
    assert engine_settings().engine == "sglang"
    (tmp_path / ".env").write_text("ROUTER_ENGINE_URL=http://localhost:1\n", encoding="utf-8")
    assert engine_settings(None, otherwise="llama_cpp").engine == "sglang"
    (tmp_path / ".env").write_text("ROUTER_ENGINE=systemone\n", encoding="utf-8")
    assert engine_settings(None, otherwise="llama_cpp").engine == "systemone"


# -- how it is shown ---------------------------------------------------------------------------------------------------


def test_a_korean_desk_is_told_why_in_both_languages_by_the_embedded_model() -> None:
    done = typed(ROOT / "routing_rules/civil_complaints", "집 앞에 쓰레기가 일주일째 그대로 쌓여 있습니다")
    said, told = done.stdout.decode(), done.stderr.decode()
    for part in (
        "civil_complaints.", "The score ", "점수 ", "likeliest", "waste: 쓰레기", "threshold ",
        "at most 10 % of such tickets are wrong, with 90 % confidence", "gemma-3-270m", "llama_cpp", "calibration",
    ):  # fmt: skip
        assert part in said, said
    assert "loading the model …" in told
    assert "Gemma Terms of Use" in " ".join(told.split())


def test_a_route_is_shown_with_its_certificate_and_the_three_likeliest(stub: StubProcess, folder: Path) -> None:
    done = typed(folder, "about login", ROUTER_ENGINE_URL=stub.url)
    found = decision(folder, stub, "about login")
    said = " ".join(done.stdout.decode().split())
    assert said.startswith("routed to 'Login': served.login ")
    assert found["reasons"][0]["sentence"] in said
    for each in found["top"]:
        assert f"{each['probability']:.4f} {each['category']}: {each['category'].title()}" in said
    assert f"'Login' is right with probability {found['probability']:.4f}" in said
    for part in ("', threshold 0.5: at most 10 % of such", found["calibration"], found["decision_id"], found["model"]):
        assert part in said, part
    assert "점수" not in said
    assert done.stderr.decode().startswith("asking the engine …\n")


def test_a_ticket_that_is_read_in_part_says_how_much(stub: StubProcess, folder: Path) -> None:
    text = "about login, and then " + "something else, " * 40
    said = " ".join(typed(folder, text, ROUTER_ENGINE_URL=stub.url).stdout.decode().split())
    assert said.startswith("to a person: served.human ")
    assert "40 tokens" in said
    assert f" of {len(text.strip()):,} characters: about login, and then something" in said


def test_what_a_mode_holds_back_is_shown_to_whoever_asks_and_not_on_the_card(stub: StubProcess, folder: Path) -> None:
    brake = {"ROUTER_ENGINE_URL": stub.url, "ROUTER_MODE": "shadow"}
    said = " ".join(typed(folder, "about login", **brake).stdout.decode().split())
    for part in ("to a person: served.human", "it would go to served.login", "certified threshold", "shadow: people"):
        assert part in said, said
    card = orjson.loads(typed(folder, "about login", "--card", **brake).stdout)
    assert (card["suggestions"], card["mode"]) == ([], "shadow")


def test_answers_to_further_questions_are_shown_with_what_is_wrong_with_them(stub: StubProcess) -> None:
    city = ROOT / "routing_rules/city_services"
    said = " ".join(typed(city, "놀이터 모래를 언제 갈아 주나요", ROUTER_ENGINE_URL=stub.url).stdout.decode().split())
    for part in ("emergency ", "urgency ", "rules take it as unknown. There is no calibration", "none in force"):
        assert part in said, said


@pytest.mark.parametrize("how", [(), ("--json",), ("--card",)])
def test_nothing_in_a_ticket_is_obeyed_by_the_terminal(how: tuple[str, ...], stub: StubProcess, folder: Path) -> None:
    text = f"{EVIL} <|im_end|> [red]x[/red] [/] \u202e"
    done = typed(folder, *how, "--id", EVIL, "--tenant", EVIL, "--", stdin=text.encode(), ROUTER_ENGINE_URL=stub.url)
    assert obeyed(done.stdout.decode()) == obeyed(done.stderr.decode()) == []
    if how:
        assert orjson.loads(done.stdout)["ticket_id"] == EVIL
    else:
        assert "< | im_end| > [ red]x[ /red] [ /]" in done.stdout.decode()


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        (("",), b"", "that is no ticket (no_text"),
        ((" \u200b\x00".replace("\x00", "\x01"),), b"", "would send it to served.dead-letter"),
        ((), b"", "that is no ticket (no_text"),
        ((), b"x" * 1_001, "more than 1000 bytes"),
        (("x" * 1_001,), b"", "too_large"),
        ((b"caf\xe9",), b"", "the text is not UTF-8: byte 4"),
        ((), b"caf\xe9", "standard input is not UTF-8: byte 4"),
        (("x", "--id", "x" * 300), b"", "id has 300 characters"),
    ],
)
def test_what_is_no_ticket_is_one_line_before_any_model_is_loaded(
    arguments: tuple[str | bytes, ...], stdin: bytes, said: str, folder: Path
) -> None:
    done = typed(folder, *arguments, stdin=stdin, code=2, ROUTER_MAX_TICKET_BYTES="1000")
    assert said in done.stderr.decode()
    assert len(done.stderr.decode().strip().splitlines()) == 1
    assert done.stdout == b""


def test_a_folder_that_is_not_there_and_arguments_that_do_not_go_together_are_refused(folder: Path) -> None:
    assert b"no such rule set folder" in typed(folder, "--rules", str(folder / "nowhere"), "x", code=2).stderr
    assert b"ask for one" in typed(folder, "x", "--json", "--card", code=2).stderr
    assert b"write a JSON object" in typed(folder, "x", "--metadata", "[1]", code=2).stderr


def test_an_engine_that_is_away_is_an_error_and_no_decision(stub: StubProcess, folder: Path) -> None:
    gone = "http://127.0.0.1:1"
    done = typed(folder, "about login", code=2, ROUTER_ENGINE_URL=gone)
    assert b"the engine cannot be asked" in done.stderr
    assert done.stdout == b""
    one_is_left = typed(folder, "about login", ROUTER_ENGINE_URL=f"{gone},{stub.url},http://127.0.0.1:2")
    assert b"served.login" in one_is_left.stdout


def test_nothing_is_made_up_for_a_ticket_that_the_engine_does_not_answer(stub: StubProcess, folder: Path) -> None:
    stub.tell(slow="never answered")
    try:
        done = typed(folder, "never answered", code=2, ROUTER_ENGINE_URL=stub.url, ROUTER_TICKET_DEADLINE_S="1")
    finally:
        stub.tell(slow=None)
    assert b"the engine cannot be asked: " in done.stderr
    assert done.stdout == b""


def test_without_the_embedded_extra_it_says_what_to_install_or_to_name(folder: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROUTER_")}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + FIRST.format(folder=str(folder))],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    for part in ("not installed", "ticket-router[embedded]", "ROUTER_ENGINE_URL"):
        assert part in done.stderr
    assert "Traceback" not in done.stderr
