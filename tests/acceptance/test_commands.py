"""The installed command, as a person types it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import jsonschema
import orjson
import pytest
import yaml

from tests.acceptance.served import write_rules
from tests.integration.desk import LABELS, Desk, StubProcess
from tests.servers.kafka import ApacheKafka
from tests.servers.redis_server import free_port
from tests.waiting import wait_for
from worker.adapters.files import load_labelled
from worker.adapters.kafka import KafkaConfig
from worker.adapters.kafka_topics import create_topics
from worker.adapters.topic_log import TopicWriter
from worker.core.envelope import CARD_HEADER, DECISION_HEADER
from worker.ports import Output

ROOT = Path(__file__).parents[2]
COMMAND = Path(sys.executable).with_name("ticket-router")


def run(*arguments: str, timeout_s: float = 240, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROUTER_")}
    return subprocess.run(
        [str(COMMAND), *arguments],
        env={**environment, "COLUMNS": "160", **settings},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_make_alone_lists_every_target_of_the_readme() -> None:
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    for target in ("make demo", "make test", "make run", "make check", "make lint", "make test-sglang"):
        assert target in done.stdout


@pytest.mark.timeout(300)
def test_the_demo_routes_both_rule_sets_and_the_second_pass_comes_from_the_cache(tmp_path: Path) -> None:
    done = run("demo", "--tickets", "8", "--report", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for said in ("helpdesk", "civil_complaints", "Gemma", "automation rate", "error among the routed", " decisions"):
        assert said in done.stdout, done.stdout
    assert "ARGS=" in done.stderr  # how long it takes, and the shorter way
    assert [line.split()[2] for line in done.stdout.splitlines() if line.startswith("next: ")] == ["decide", "local"]
    assert done.stdout.count("0 of 8, 8 of 8") == 2  # cache hits of the first and of the second pass
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "civil_complaints" in page
    assert "<script src" not in page


@pytest.mark.kafka
def test_check_says_what_is_right_what_is_wrong_and_what_to_do(tmp_path: Path, apache_kafka: ApacheKafka) -> None:
    with StubProcess() as stub:
        desk = Desk(tmp_path, apache_kafka.bootstrap_servers, stub.url)
        good = run("check", "--rules", str(tmp_path), **desk.environment)
        assert good.returncode == 0, good.stdout
        assert good.stdout.count("ok") >= 6
        stub.tell(mass=0.01)
        (tmp_path / "calibration.json").unlink()
        away = {"ROUTER_REDIS_URL": "redis://127.0.0.1:1/0"}
        bad = run("check", "--rules", str(tmp_path), **(desk.environment | away))
    assert bad.returncode == 1
    for said in ("would rather write something else", "every ticket goes to people", "scored again", "→"):
        assert said in bad.stdout, bad.stdout
    unreachable = desk.environment | {"ROUTER_KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1"}
    nothing = run("check", "--rules", str(tmp_path), **unreachable)
    assert nothing.returncode == 1
    assert "ROUTER_KAFKA_BOOTSTRAP_SERVERS" in nothing.stdout


@pytest.mark.kafka
def test_exported_decisions_fit_the_printed_schema(tmp_path: Path, apache_kafka: ApacheKafka) -> None:
    with StubProcess() as stub:
        desk = Desk(tmp_path, apache_kafka.bootstrap_servers, stub.url)
        with desk.worker() as worker:
            desk.wait_for_all(desk.send(12))
            wait_for(lambda: worker.status()["settled"] == 12, "settling")
        listed = run("topics", "--rules", str(tmp_path), **desk.environment)
        target = tmp_path / "decisions.jsonl"
        exported = run("export", "--rules", str(tmp_path), "--to", str(target), **desk.environment)
    assert "missing" not in listed.stdout
    assert exported.returncode == 0, exported.stderr
    schema = orjson.loads(run("schema").stdout)
    lines = [orjson.loads(line) for line in target.read_bytes().splitlines()]
    assert len(lines) == 12
    for line in lines:
        jsonschema.validate(line, schema)
    headers = [dict(record.headers)[DECISION_HEADER] for record in desk.records()]
    assert sorted(h or b"" for h in headers) == sorted(target.read_bytes().splitlines())


@pytest.mark.kafka
def test_a_shadow_worker_routes_nothing_and_peoples_answers_to_its_cards_become_labels(
    tmp_path: Path, apache_kafka: ApacheKafka
) -> None:
    def export(what: str) -> Path:
        target = tmp_path / f"{what}.jsonl"
        done = run("export", "--rules", str(tmp_path), "--what", what, "--to", str(target), **desk.environment)
        assert done.returncode == 0, done.stderr
        return target

    with StubProcess() as stub:
        desk = Desk(tmp_path, apache_kafka.bootstrap_servers, stub.url)
        answers = f"{desk.rules.id}.answers"
        rules = {"version": 1, "alpha": 0.1, "delta": 0.1, "topics": {"answers": answers}}
        (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules), encoding="utf-8")
        create_topics(KafkaConfig(apache_kafka.bootstrap_servers, desk.rules.input_topic, "tests"), {answers: 1})
        with desk.worker(mode="shadow"):
            desk.wait_for_all(desk.send(12))
        held = run("check", "--rules", str(tmp_path), **(desk.environment | {"ROUTER_MODE": "shadow"}))
    assert "held back by ROUTER_MODE=shadow" in held.stdout.replace("\n", " "), held.stdout
    people = desk.records(desk.rules.human_topic)
    assert len(people) == 12 and len(desk.records()) == 12
    writer = TopicWriter(apache_kafka.bootstrap_servers)
    for record in people:
        card, ticket = orjson.loads(dict(record.headers)[CARD_HEADER] or b""), orjson.loads(record.value or b"")
        assert (card["suggestions"], card["mode"], card["answer"]["topic"]) == ([], "shadow", answers)
        found = {"answered_at": datetime.now(UTC).isoformat(), "category": ticket["text"].rsplit(" ", 1)[1]}
        writer.write(Output(answers, None, orjson.dumps({**card["answer"]["event"], **found})))
    writer.flush(60)
    files = {name: str(export(name)) for name in ("decisions", "tickets", "answers")}
    made = run(
        "labels", "--rules", str(tmp_path), "--answers", files["answers"], "--log", files["decisions"],
        "--tickets", files["tickets"], "--out", str(tmp_path / "labelled.csv"),
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert "12 labelled tickets, 12 of them answered in shadow" in made.stdout
    labelled = load_labelled(tmp_path / "labelled.csv", desk.rules.categories.ids)
    assert sorted((t.id, t.label) for t in labelled) == sorted((f"t{n}", LABELS[n % 3]) for n in range(12))
    assert all(t.text.endswith(t.label) for t in labelled)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "ROUTER_KAFKA_BOOTSTRAP_SERVERS"),
        ({"ROUTER_KAFKA_BOOTSTRAP_SERVERS": "localhost:1"}, "ROUTER_ENGINE_URL"),
        ({"ROUTER_KAFKA_BOOTSRAP_SERVERS": "localhost:1"}, "did you mean ROUTER_KAFKA_BOOTSTRAP_SERVERS"),
        ({"ROUTER_REDIS_URL": "redis://localhost:1/0"}, "ROUTER_CACHE_SECRET"),
        ({"ROUTER_MAX_IN_FLIGHT": "many"}, "ROUTER_MAX_IN_FLIGHT"),
    ],
)
def test_a_missing_or_misspelt_setting_is_one_line_that_names_it(settings: dict[str, str], said: str) -> None:
    done = run("run", "--rules", "routing_rules/helpdesk", **settings)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_check_runs_the_rule_sets_own_tests(tmp_path: Path) -> None:
    folder = tmp_path / "helpdesk"
    shutil.copytree(ROOT / "routing_rules" / "helpdesk", folder)
    rules = folder / "rules.yaml"
    text = rules.read_text(encoding="utf-8")
    rules.write_text(text.replace("expect: {action: escalate}", "expect: {action: score}", 1), encoding="utf-8")
    done = run("check", "--rules", str(folder))
    assert done.returncode == 1
    assert "test 'a phishing mail goes to people': expected score, got escalate" in " ".join(done.stdout.split())


def test_a_report_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("demo", "--report", str(tmp_path / "file"), timeout_s=30)
    assert done.returncode == 2
    assert "cannot be made a folder" in " ".join(done.stderr.replace("│", " ").split())


def test_a_rule_set_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = run("run", "--rules", str(tmp_path / "nowhere"), ROUTER_KAFKA_BOOTSTRAP_SERVERS="localhost:1")
    assert done.returncode == 2
    assert "no such rule set folder" in done.stderr
    misspelt = run("check", "--rules", "routing_rules/helpdesc")
    assert "did you mean routing_rules/helpdesk?" in " ".join(misspelt.stdout.split())


def test_a_worker_says_at_once_what_it_waits_for_and_asks_kafka_before_the_engine(tmp_path: Path) -> None:
    """Neither answers here: before an engine is waited for without end, the worker ends over its topics."""
    write_rules(tmp_path, "", calibrated=False)
    kafka, engine = f"127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    done = run(
        "run", "--rules", str(tmp_path), ROUTER_KAFKA_BOOTSTRAP_SERVERS=kafka, ROUTER_ENGINE_URL=engine,
        ROUTER_HTTP_PORT="0", ROUTER_CACHE_SECRET="for-the-tests-only-and-long-enough", ROUTER_LOG_FORMAT="json",
    )  # fmt: skip
    assert done.returncode == 2 and kafka in done.stderr, done.stderr
    first = orjson.loads(done.stdout.splitlines()[0])
    assert "worker.waiting" in str(first) and "looking for its topics on Kafka" in str(first)
    assert "engine" not in done.stdout


def test_a_server_says_at_once_which_model_it_loads(tmp_path: Path) -> None:
    write_rules(tmp_path, "", calibrated=False)
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"no model")
    done = run(
        "serve", "--rules", str(tmp_path), ROUTER_ENGINE="llama_cpp", ROUTER_ENGINE_MODEL_PATH=str(model),
        ROUTER_HTTP_PORT="0", ROUTER_SERVE_PORT="0", ROUTER_CACHE_SECRET="for-the-tests-only-and-long-enough",
        ROUTER_LOG_FORMAT="json",
    )  # fmt: skip
    assert done.returncode != 0
    assert "loading the model of the embedded engine" in done.stdout.splitlines()[0]
