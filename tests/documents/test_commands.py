"""Every command that a document shows can be typed, and those in blocks are typed here, in a copy of the repository."""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import orjson
import pytest
import yaml

from tests.documents.commands import DOCUMENTS, OTHERS, ROOT, Command, commands, problem
from tests.integration.desk import StubProcess, http
from tests.servers.kafka import ApacheKafka
from tests.servers.redis_server import free_port
from tests.waiting import wait_for

ALL = [command for document in DOCUMENTS for command in commands(document)]
WHOLE = [command for command in ALL if command.whole]

NOT_RUN: Mapping[str, str] = {
    r"make demo\b": "tests/acceptance/test_commands.py runs `ticket-router demo` with fewer tickets",
    r"make test\b": "it runs this test",
    r"make chaos\b": "takes ten minutes; tests/chaos has its parts",
    r"make bench\b": "takes minutes; tests/bench runs its parts",
    r"make test-(sglang|vllm)\b": "installs gigabytes",
    r"docker ": "needs Docker; the compose file and the Dockerfile are held against their tools in tests/deploy",
    r"kubectl ": "needs a cluster; tests/deploy builds the same folders and holds them against the schemas",
    r"pip install": "reaches a package index",
    r"ticket-router top ": "watches workers by name until it is ended; its own tests show it",
    r"ticket-router .*--chat-template gemma": "needs that model; tests/offline/test_choices.py asks others",
}
"""What stands in a block and is not run here, and why."""
ENDS_WITH: Mapping[str, int] = {r"ticket-router rules diff": 1}
"""Exit codes that are no failure: two versions differ."""
LOCAL = re.compile(r"\.venv/bin/ticket-router local\b")
"""It runs on while the other commands of its section are typed in a second terminal."""
LASTING = re.compile(r"(?:\.venv/bin/)?(?:ticket-router|make) +(run|serve)\b")
TICKETS = 400


def test_the_documents_show_commands() -> None:
    assert len(WHOLE) >= 20
    assert {command.document for command in ALL} >= {"README.md", "operating.md", "calibration.md", "deploying.md"}


@pytest.mark.parametrize("command", ALL, ids=str)
def test_every_command_that_is_named_exists_with_its_options_targets_and_files(command: Command) -> None:
    assert problem(command) is None


@pytest.mark.parametrize(
    "shell",
    [
        "ticket-router chekc --rules FOLDER",
        "ticket-router check",
        "ticket-router calibrate --rules FOLDER --labeled tickets.csv",
        "make rum RULES=routing_rules/helpdesk",
        "make run RULE=routing_rules/helpdesk",
        "docker compose --profile tpu up",
        "docker build -f deploy/Dockerfile --target none .",
        "kubectl apply -k deploy/kubernetes/overlays/none",
        "pip install 'ticket-router[everything]'",
        "export ROUTER_ENGINE_URI=http://localhost:30000",
        "cp .env.sample .env",
    ],
)
def test_a_command_that_is_misspelt_would_be_found(shell: str) -> None:
    assert problem(Command("a document", 1, shell, whole=True)) is not None


def test_every_exception_is_needed_and_has_a_reason() -> None:
    for pattern, reason in NOT_RUN.items():
        assert any(re.match(pattern, command.shell) for command in ALL), pattern
        assert reason
    assert all(any(command.shell.startswith(name) for command in ALL) for name in OTHERS)


def runs_here(command: Command) -> bool:
    return not any(re.match(pattern, command.shell) for pattern in NOT_RUN)


class Sandbox:
    """A copy of what the commands touch, and servers under the addresses that the documents name."""

    def __init__(self, folder: Path, brokers: str, engine: StubProcess, redis_url: str) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "routing_rules", folder / "routing_rules")
        for name in ("Makefile", ".env.example"):
            shutil.copy(ROOT / name, folder / name)
        (folder / ".venv").symlink_to(ROOT / ".venv")
        (folder / "build").mkdir()
        self.helpdesk = folder / "routing_rules/helpdesk"
        page = yaml.safe_load((self.helpdesk / "categories.yaml").read_text(encoding="utf-8"))
        self.labels = {category["id"]: category.get("label", category["id"]) for category in page["categories"]}
        known = {text: category["id"] for category in page["categories"] for text in category["examples"]}
        known |= {f"the {word} desk": name for name, word in self.labels.items()}
        engine.tell(keywords={text: f" {self.labels[name]}" for text, name in known.items()}, strength=6.0)
        self._addresses = {
            "localhost:9092": brokers,
            "http://localhost:30000": engine.url,
            "redis://localhost:6379/0": redis_url,
        }
        self._tickets("tickets.csv", 0)
        self._tickets("later.csv", TICKETS)
        self._tickets("traffic.csv", 2 * TICKETS, rows=600)
        (folder / "shares.csv").write_text("category,share\n" + "".join(f"{name},1\n" for name in self.labels))
        choices = '{"question": "Which is a colour?", "options": ["green", "seven"], "answer": "green"}\n'
        (folder / "questions.jsonl").write_text(choices * 2)
        self._further()
        self.port = free_port()
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("ROUTER_", "OTEL_"))},
            "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}",
            "ROUTER_KAFKA_BOOTSTRAP_SERVERS": brokers,
            "ROUTER_ENGINE_URL": engine.url,
            "ROUTER_HTTP_PORT": str(self.port),
            "ROUTER_SERVE_PORT": str(free_port()),
        }
        self._local: subprocess.Popen[bytes] | None = None
        self._local_section = ""
        self._local_variables: dict[str, str] = {}

    def _tickets(self, name: str, first: int, rows: int = TICKETS) -> None:
        """Each names its desk, which the engine follows; every tenth names none."""
        ids = list(self.labels)
        with (self.folder / name).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["id", "text", "label", "urgency", "emergency"])
            for i in range(first, first + rows):
                label = ids[i % len(ids)]
                said = f"for the {self.labels[label]} desk" if i % 10 else "for somebody"
                words = f"{said}, number {i} of {chr(97 + i % 26)}{chr(97 + i // 26 % 26)}{chr(97 + i // 676)}"
                writer.writerow([i, f"Something is wrong, {words}", label, i % 3 + 1, "yes" if i % 7 else "no"])

    def _further(self) -> None:
        """FOLDER: the helpdesk with the further questions that docs/questions.md shows."""
        page = (ROOT / "docs/questions.md").read_text(encoding="utf-8")
        asked = re.findall(r"```yaml\n(questions:.*?)```", page, re.DOTALL)[0]
        shutil.copytree(self.helpdesk, self.folder / "FOLDER")
        (self.folder / "FOLDER/questions.yaml").write_text(asked, encoding="utf-8")
        samples = self.folder / "FOLDER/samples/tickets.csv"
        few = samples.read_text(encoding="utf-8").splitlines(keepends=True)[:101]
        samples.write_text("".join(few), encoding="utf-8")

    def two_versions(self) -> None:
        """OLD, which has decided, and NEW, which asks for less."""
        for name in ("OLD", "NEW"):
            shutil.copytree(self.helpdesk, self.folder / name)
        rules = self.folder / "NEW/rules.yaml"
        rules.write_text(re.sub(r"(?m)^delta: .*$", "delta: 0.2", rules.read_text(encoding="utf-8")), encoding="utf-8")

    def run(self, command: Command) -> None:
        if command.document == "what-if.md" and not (self.folder / "OLD").exists():
            self.two_versions()
        if LOCAL.match(command.shell):
            self._start_local(command)
            return
        lasts = LASTING.match(command.shell) is not None
        shell = re.sub(r"^make ", "make -o .venv/.ready ", command.shell)  # nothing is to be installed here
        script = "\n".join(["set -euo pipefail", *command.before, f"exec {shell}" if lasts else shell])
        for shown, real in self._addresses.items():
            script = script.replace(shown, real)
        (self._lasting if lasts else self._ending)(command, script)

    def close(self) -> None:
        if self._local is not None:
            self._local.send_signal(signal.SIGINT)
            assert self._local.wait(90) == 0

    def _start_local(self, command: Command) -> None:
        printed = self.folder / "local.out"
        with printed.open("wb") as out:
            self._local = subprocess.Popen(
                ["bash", "-c", f"exec {command.shell}"], cwd=self.folder, env=self.environment, stdout=out
            )
        wait_for(lambda: "ROUTER_ENGINE=" in printed.read_text(), f"{command} to print its variables", 120)
        lines = printed.read_text().splitlines()
        said = dict(line.removeprefix("export ").split("=", 1) for line in lines)
        del said["ROUTER_ENGINE"]  # the stub knows more tickets in less time
        self._local_section, self._local_variables = command.section, said

    def _environment_of(self, command: Command) -> dict[str, str]:
        is_local = self._local is not None and command.section == self._local_section
        return {**self.environment, **self._local_variables} if is_local else self.environment

    def _ending(self, command: Command, script: str) -> None:
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self._environment_of(command),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        wanted = next((code for name, code in ENDS_WITH.items() if re.match(name, command.shell)), 0)
        assert done.returncode == wanted, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"

    def _lasting(self, command: Command, script: str) -> None:
        """It gets ready, a worker routes what is sent to it, and it ends with 0 when it is asked to."""
        log = self.folder / "lasting.log"
        shell = ["bash", "-c", script]
        with log.open("wb") as out:
            process = subprocess.Popen(
                shell,
                cwd=self.folder,
                env=self._environment_of(command),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            wait_for(lambda: self._is_ready() or process.poll() is not None, f"{command} to get ready", 120)
            assert process.poll() is None, log.read_text()[-3000:]
            if rules := re.search(r"run .*(?:--rules |RULES=)(\S+)", script):
                sent = f"ticket-router send --rules {rules[1]} --tickets tickets.csv"
                self._ending(command, sent)
                wait_for(lambda: self._settled() >= TICKETS, "settling", 120)
            os.kill(_worker(process.pid), signal.SIGTERM)
            assert process.wait(90) == 0, log.read_text()[-3000:]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _is_ready(self) -> bool:
        return http(f"http://127.0.0.1:{self.port}/readyz")[0] == 200

    def _settled(self) -> int:
        status, body = http(f"http://127.0.0.1:{self.port}/status")
        return int(orjson.loads(body)["settled"]) if status == 200 else 0


def _worker(pid: int) -> int:
    """The process below a make, which waits for it and hands its exit code on; else the process itself."""
    children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    return int(children[0]) if children else pid


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory, apache_kafka: ApacheKafka, redis_url: str) -> Iterator[Sandbox]:
    with StubProcess(latency_s=0.0) as engine:
        folder = tmp_path_factory.mktemp("documents")
        started = Sandbox(folder, apache_kafka.bootstrap_servers, engine, redis_url)
        try:
            yield started
        finally:
            started.close()


def once(shown: Iterable[Command]) -> list[Command]:
    found: dict[str, Command] = {}
    for command in shown:
        found.setdefault(" ".join(command.words), command)
    return list(found.values())


IN_ORDER = once(filter(runs_here, WHOLE))
"""The README first: it makes topics and a calibration, as it does for whoever reads it."""


@pytest.mark.kafka
@pytest.mark.timeout(420)
@pytest.mark.parametrize("command", IN_ORDER, ids=str)
def test_what_a_block_shows_runs(sandbox: Sandbox, command: Command) -> None:
    sandbox.run(command)
