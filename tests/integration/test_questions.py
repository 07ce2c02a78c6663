"""Two levels and three questions a ticket through Kafka: a whole worker on the embedded broker and the stub engine."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from tests.core.sets import artefact, certificate
from tests.servers.stub_engine import StubEngine
from worker import wiring
from worker.adapters.embedded import EmbeddedBroker
from worker.adapters.files import Labelled, calibration_file, load_artefact, load_rule_set
from worker.adapters.memory import MemoryCache
from worker.adapters.topic_log import Record, TopicReader
from worker.core.calibration import Calibrator
from worker.core.digest import fingerprint
from worker.core.envelope import Origin, decision_id
from worker.core.policy import Calibration
from worker.core.rules import RuleSet
from worker.offline.audit import audit
from worker.offline.demo import run_desk
from worker.runtime.loop import Worker
from worker.settings import Settings
from worker.telemetry import Metrics, NoTracing
from worker.wiring import Assembly, Desk

CATEGORIES = {
    "id": "city",
    "version": 1,
    "language": "en",
    "prompt": {"instruction": "Sort.", "answer_cue": "Matter:"},
    "two_levels": {
        "departments": [{"id": name, "name": name, "description": name, "label": name} for name in ("roads", "water")]
    },
    "categories": [
        {
            "id": name,
            "name": name,
            "description": name,
            "label": name,
            "parent": parent,
            "examples": [f"the {name} here"],
        }
        for name, parent in (("hole", "roads"), ("lamp", "roads"), ("leak", "water"), ("meter", "water"))
    ]
    + [{"id": "none", "name": "none", "description": "nothing", "label": "other", "examples": ["good day"]}],
}
QUESTIONS = {
    "questions": [
        {"id": "emergency", "kind": "yes_no", "ask": "Now?", "cue": "Emergency:", "yes": "danger", "no": "calm"},
        {"id": "abusive", "kind": "yes_no", "ask": "Rude?", "cue": "Abusive:", "yes": "rude", "no": "polite"},
        {
            "id": "urgency",
            "kind": "score",
            "ask": "When?",
            "cue": "Urgency:",
            "levels": [{"name": word, "label": word} for word in ("later", "soon", "now")],
        },
    ]
}
RULES = {
    "version": 1,
    "alpha": 0.1,
    "delta": 0.1,
    "answers": [
        {"kind": "answer", "name": "duty", "question": "emergency", "is": "yes", "probability": 0.6, "then": "escalate"}
        | {"topic": "city.duty"},
        {"kind": "answer", "name": "rude", "question": "abusive", "is": "yes", "probability": 0.6, "then": "escalate"},
    ],
}
KEYWORDS = {"pothole": " roads", "Matter:": " hole", "fire": " danger", "idiots": " rude"}
"""The stub raises the label that the item's last keyword stands for, where it is asked about: behind "Matter:" it is
`hole`, whatever the ticket says. Without a keyword, labels differ by less than 1 nat, by chance."""


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[tuple[Path, StubEngine]]:
    for name, content in (("categories", CATEGORIES), ("questions", QUESTIONS), ("rules", RULES)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    async with StubEngine() as stub:
        stub.behaviour.keywords = KEYWORDS
        yield tmp_path, stub


async def calibrate(folder: Path, settings: Settings, *names: str | None) -> None:
    """Artefacts that fit what runs; their numbers are made up: no question says yes of itself."""
    rules = load_rule_set(folder)
    ((_, engine),) = wiring.make_engines(settings)
    for name in names:
        asked = await wiring.ask_once(rules, engine, name)
        size = len(asked.rule_set.categories.ids)
        bias = (-1.5, *(0.0,) * (size - 1)) if size == 2 else (0.0,) * size
        own = certificate(*(c.id for c in asked.rule_set.categories.routable), threshold=0.3)
        made = artefact(
            asked.rule_set,
            own,
            fingerprints=asked.fingerprints,
            calibrator=Calibrator("bias_temperature", (1.0,) * size, bias),
        )
        (folder / calibration_file(name)).write_bytes(made.to_bytes())
    await engine.aclose()


async def through_kafka(folder: Path, settings: Settings, texts: dict[str, str]) -> tuple[dict[str, Any], list[Record]]:
    """Envelopes by ticket id, and every record of the topics in which tickets end; the audit is clean."""
    desk = Desk.load(folder)
    rules = desk.rule_set
    with EmbeddedBroker(dict.fromkeys((rules.input_topic, *rules.output_topics), 1)) as broker:
        on_broker = settings.model_copy(update={"kafka_bootstrap_servers": broker.bootstrap_servers})
        engines = wiring.make_engines(on_broker)

        @asynccontextmanager
        async def open_worker() -> AsyncIterator[Worker]:
            question = await wiring.ask_once(rules, engines[0][1])
            async with Assembly(
                on_broker,
                question,
                await wiring.calibration_for(desk, question, engines, lambda _: None),
                further=await wiring.further_for(desk, question, engines, lambda _: None),
                engines=engines,
                cache=MemoryCache(),
                stream=wiring.make_stream(on_broker, rules),
                secret=secrets.token_bytes(32),
                journal=wiring.make_journal(on_broker, Metrics()),
                tracing=NoTracing(),
            ) as assembly:
                yield assembly.worker

        result = await run_desk(
            rules,
            desk.artefact,
            [Labelled(name, text, "none") for name, text in texts.items()],
            bootstrap_servers=broker.bootstrap_servers,
            open_worker=open_worker,
            passes=1,
            progress=lambda *_: None,
        )
        for _, engine in engines:
            await engine.aclose()
        reader = TopicReader(broker.bootstrap_servers, group_id=f"ticket-router.{rules.id}")
        ends = list(reader.records([t for t in rules.output_topics if t != rules.decisions_topic]))
        tickets = list(reader.records([rules.input_topic]))
        ledger = audit(rules, tickets, ends, reader.committed(rules.input_topic))
        reader.close()
    assert (ledger.clean, ledger.waiting, len(tickets)) == (True, 0, len(texts))
    assert ledger.ends.get("routed", 0) == sum(record.partition.topic == "city.hole" for record in ends)
    return {e["ticket_id"]: e for e in result.first.envelopes}, ends


def ended(records: list[Record]) -> dict[str, str]:
    return {orjson.loads(record.value or b"")["id"]: record.partition.topic for record in records}


@pytest.fixture
def settings(folder: tuple[Path, StubEngine]) -> Settings:
    return Settings(
        engine_url=folder[1].url,
        delivery="at_least_once",
        kafka_assignment_strategy="range",
        kafka_session_timeout_ms=6_000,
        settle_interval_ms=50,
        kafka_bootstrap_servers="unset:1",
    )


TEXTS = {
    "road": "a pothole again",
    "fire": "a pothole, and now there is fire",
    "rude": "a pothole, you idiots",
}


async def test_tickets_with_two_levels_and_three_questions_end_where_category_and_answers_say(
    folder: tuple[Path, StubEngine], settings: Settings
) -> None:
    await calibrate(folder[0], settings, None, "emergency", "abusive", "urgency")
    envelopes, records = await through_kafka(folder[0], settings, TEXTS)
    assert ended(records) == {"road": "city.hole", "fire": "city.duty", "rude": "city.human"}
    road, fire = envelopes["road"], envelopes["fire"]
    assert road["reasons"][0]["code"] == "certified"
    assert fire["reasons"][0]["code"] == "answer_escalation"
    assert (fire["action"], fire["topic"]) == ("escalate", "city.duty")
    for envelope in envelopes.values():
        assert [a["question"] for a in envelope["answers"]] == ["emergency", "abusive", "urgency"]
        assert all(a["problem"] is None for a in envelope["answers"])
        urgency = envelope["answers"][2]
        mean = sum(int(level) * p for level, p in urgency["distribution"].items())
        assert 1.0 < urgency["expected"] < 3.0
        assert urgency["expected"] == pytest.approx(mean)
        assert envelope["labels"] == ["hole", "lamp", "leak", "meter", "none"]
    assert fire["answers"][0]["distribution"]["yes"] > 0.6 > road["answers"][0]["distribution"]["yes"]
    # A decision's id depends on every calibration that may have a say in it.
    digests = [load_artefact(folder[0] / calibration_file(name)) for name in (None, "emergency", "abusive", "urgency")]
    stamp = fingerprint("calibrations/1", *(made.digest for made in digests if made is not None))
    for envelope in envelopes.values():
        origin = Origin(**envelope["origin"])
        assert envelope["decision_id"] == decision_id(origin, envelope["rule_set"], stamp)


async def test_without_a_calibration_of_a_question_its_rule_sends_everything_to_people_and_nothing_to_the_duty_desk(
    folder: tuple[Path, StubEngine], settings: Settings
) -> None:
    await calibrate(folder[0], settings, None, "abusive", "urgency")
    desk = Desk.load(folder[0])
    assert isinstance(desk.rule_set, RuleSet)
    assert desk.further["emergency"] is None
    envelopes, records = await through_kafka(folder[0], settings, TEXTS)
    assert set(ended(records).values()) == {"city.human"}
    codes = {name: [w["code"] for w in e["reasons"]] for name, e in envelopes.items()}
    assert codes["road"] == ["question_unanswered"]
    assert envelopes["fire"]["answers"][0] | {"label_mass": None, "label_scores": None} == {
        "question": "emergency",
        "kind": "yes_no",
        "answer": "yes",
        "probability": None,
        "distribution": None,
        "expected": None,
        "problem": envelopes["fire"]["answers"][0]["problem"],
        "label_mass": None,
        "labels": ["yes", "no"],
        "label_scores": None,
        "calibration": None,
        "cached": False,
    }
    assert envelopes["fire"]["answers"][0]["problem"]["code"] == "uncalibrated"


async def test_an_altered_question_voids_its_own_calibration_and_no_other(
    folder: tuple[Path, StubEngine], settings: Settings
) -> None:
    await calibrate(folder[0], settings, None, "emergency", "abusive", "urgency")
    text = (folder[0] / "questions.yaml").read_text(encoding="utf-8")
    (folder[0] / "questions.yaml").write_text(text.replace("Rude?", "Is it rude?"), encoding="utf-8")
    desk = Desk.load(folder[0])
    engines = wiring.make_engines(settings)
    question = await wiring.ask_once(desk.rule_set, engines[0][1])
    own = await wiring.calibration_for(desk, question, engines, lambda _: None)
    further = await wiring.further_for(desk, question, engines, lambda _: None)
    await engines[0][1].aclose()
    assert isinstance(own, Calibration)
    assert [isinstance(calibration, Calibration) for _, calibration in further] == [True, False, True]
