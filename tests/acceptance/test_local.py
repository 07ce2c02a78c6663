"""`ticket-router local`: a broker and a cache on this machine, which the other commands reach from other processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.desk import StubProcess
from tests.servers.redis_server import free_port
from tests.waiting import wait_for
from worker.settings import Settings

ROOT = Path(__file__).parents[2]
COMMAND = Path(sys.executable).with_name("ticket-router")
HELPDESK, COMPLAINTS, SERVICES = (f"routing_rules/{name}" for name in ("helpdesk", "civil_complaints", "city_services"))
TICKETS = 4


@dataclass(frozen=True)
class Local:
    """One that runs, and what it printed."""

    process: subprocess.Popen[bytes]
    variables: Mapping[str, str]
    said: str

    def run(self, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """A command in an environment that has nothing but its variables."""
        return subprocess.run(
            [str(COMMAND), *arguments],
            env=environment(**{**self.variables, **settings}),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )


def environment(**settings: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ROUTER_")}
    return {**kept, "COLUMNS": "160", **settings}


def start(folder: Path, *rule_sets: str) -> Local:
    named = [part for name in rule_sets for part in ("--rules", name)]
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen([str(COMMAND), "local", *named], env=environment(), cwd=ROOT, stdout=out, stderr=err)
    wait_for(lambda: "audit" in (folder / "err").read_text() or process.poll() is not None, "the broker", 120)
    lines = (folder / "out").read_text().splitlines()
    assert all(line.startswith("export ") for line in lines), lines
    pairs = (line.removeprefix("export ").partition("=") for line in lines)
    return Local(process, {name: value for name, _, value in pairs}, (folder / "err").read_text())


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    started = start(tmp_path_factory.mktemp("local"), HELPDESK, COMPLAINTS)
    yield started
    started.process.kill()
    started.process.wait()


def test_it_says_what_to_type_and_that_it_is_nothing_for_real_tickets(local: Local) -> None:
    known = {f"ROUTER_{name.upper()}" for name in Settings.model_fields}
    assert local.variables.keys() <= known
    assert local.variables["ROUTER_DELIVERY"] == "at_least_once"
    for said in (
        "nothing for real tickets",
        "forget all",
        f"send --rules {HELPDESK} --tickets",
        f"run --rules {HELPDESK}",
    ):
        assert said in " ".join(local.said.split())


@pytest.mark.timeout(300)
def test_tickets_of_a_file_are_routed_by_a_worker_in_another_process(local: Local, tmp_path: Path) -> None:
    samples = f"{HELPDESK}/samples/tickets.csv"
    sent = local.run("send", "--rules", HELPDESK, "--tickets", samples, "--limit", str(TICKETS))
    assert f"{TICKETS} tickets sent" in sent.stdout, sent.stderr
    log = tmp_path / "log"
    with log.open("wb") as out:
        worker = subprocess.Popen(
            [str(COMMAND), "run", "--rules", HELPDESK],
            env=environment(**local.variables, ROUTER_HTTP_PORT=str(free_port())),
            cwd=ROOT,
            stdout=out,
            stderr=out,
        )
    try:
        wait_for(lambda: log.read_text().count("ticket.decided") >= TICKETS, "decisions", 200)
        worker.send_signal(signal.SIGINT)
        assert worker.wait(60) == 0, log.read_text()
    finally:
        worker.kill()
        worker.wait()
    audit = local.run("audit", "--rules", HELPDESK)
    assert audit.returncode == 0, audit.stdout
    assert f"{TICKETS} tickets" in audit.stdout
    assert "0 waiting" in audit.stdout
    assert "missing 0, duplicates 0, order violations 0" in audit.stdout
    assert len(local.run("export", "--rules", HELPDESK).stdout.splitlines()) == TICKETS
    assert f"helpdesk: {TICKETS} entries" in local.run("cache", "stats", "--rules", HELPDESK).stdout


def test_every_named_rule_set_has_its_topics_and_others_can_be_made(local: Local) -> None:
    for name in (HELPDESK, COMPLAINTS):
        listed = local.run("topics", "--rules", name)
        assert listed.returncode == 0, listed.stderr
        assert "missing" not in listed.stdout
    assert "missing" in local.run("topics", "--rules", SERVICES).stdout
    made = local.run("topics", "--rules", SERVICES, "--create")
    assert made.returncode == 0, made.stderr
    assert "missing" not in made.stdout


def test_exactly_once_is_refused_with_what_to_set(local: Local) -> None:
    with StubProcess() as engine:
        settings = {"ROUTER_ENGINE": "sglang", "ROUTER_ENGINE_URL": engine.url, "ROUTER_HTTP_PORT": "0"}
        done = local.run("run", "--rules", HELPDESK, ROUTER_DELIVERY="exactly_once", **settings)
    assert done.returncode == 2
    assert "ROUTER_DELIVERY=at_least_once" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_broker_and_cache(tmp_path: Path, number: signal.Signals) -> None:
    ended = start(tmp_path, HELPDESK)
    places = [ended.variables["ROUTER_KAFKA_BOOTSTRAP_SERVERS"], ended.variables["ROUTER_REDIS_URL"].split("/")[2]]
    assert all(map(listens, places))
    ended.process.send_signal(number)
    assert ended.process.wait(60) == 0
    assert not any(map(listens, places))


def listens(place: str) -> bool:
    host, _, port = place.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_a_rule_set_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = start(tmp_path, "routing_rules/helpdesc")
    assert done.process.wait(60) == 2
    assert "did you mean routing_rules/helpdesk?" in done.said
    assert not done.variables
