"""Secrets are never printed: every setting that is one holds a marked value, and all that anything says is searched."""

from __future__ import annotations

import json
import os
import subprocess
import traceback
import urllib.error
import urllib.request
from typing import Any

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from tests.integration.desk import COMMAND, Desk, http
from tests.integration.secured import command, findings, settings_of
from tests.servers.redis_server import free_port
from tests.waiting import wait_for
from worker import serving
from worker.cli import app
from worker.errors import ConfigError
from worker.settings import ClientProperties, Settings, load_settings

MARK = "mark3d"
"""In every secret, and nowhere else."""
PROPERTIES = {
    "sasl.username": "ticket-router",
    "sasl.password": f"{MARK}-of-sasl",
    "ssl.key.password": f"{MARK}-of-the-key",
    "ssl.keystore.password": f"{MARK}-of-the-store",
    "sasl.oauthbearer.client.secret": f"{MARK}-of-oauth",
}
NOWHERE = "127.0.0.1:1"
MARKED: dict[str, str] = {
    "kafka_properties": json.dumps(PROPERTIES),
    "redis_url": f"redis://user:{MARK}-of-redis@{NOWHERE}/0",
    "cache_secret": f"{MARK}-which-signs-scores",
    "engine_api_key": f"{MARK}-of-the-engine",
    "serve_token": f"{MARK}-of-those-who-ask",
}


def is_secret(annotation: object) -> bool:
    return "SecretStr" in str(annotation) or annotation is SecretStr


def test_every_secret_setting_is_among_those_that_are_marked() -> None:
    found = {
        name
        for name, field in Settings.model_fields.items()
        if is_secret(field.annotation) or ClientProperties in (field.default_factory, type(field.default))
    }
    assert found == set(MARKED)


def environment_of(settings: dict[str, str]) -> dict[str, str]:
    return {f"ROUTER_{name.upper()}": value for name, value in settings.items()}


def settings_from(marked: dict[str, str]) -> dict[str, Any]:
    return {**marked, "kafka_properties": PROPERTIES}


def free_of_secrets(*said: str | bytes) -> None:
    for each in said:
        text = each.decode(errors="replace") if isinstance(each, bytes) else each
        assert MARK not in text, text[max(0, text.index(MARK) - 300) : text.index(MARK) + 50]


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("ROUTER_", "OTEL_"))]:
        monkeypatch.delenv(name)


@pytest.mark.kafka
def test_a_worker_that_works_and_one_whose_engine_fails_print_none(desk: Desk, engine: Any) -> None:
    desk.environment |= {  # nobody listens there, which the exporter complains about
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{NOWHERE}",
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {MARK}-of-the-collector",
    }
    settings = {**MARKED, "kafka_properties": json.dumps({**PROPERTIES, "debug": "security,conf"})}
    with desk.worker(**settings, log_level="debug", log_ticket_text="true") as worker:
        desk.send_raw(b"no ticket")
        desk.wait_for_all(desk.send(10))
        engine.tell(fault="error")
        try:
            desk.send(3, first=10)
            wait_for(lambda: "engine.down" in worker.log.read_text(encoding="utf-8"), "the engine to be down", 90)
            pages = [http(f"http://127.0.0.1:{worker.port}/{page}")[1] for page in ("metrics", "status", "readyz", "x")]
        finally:
            engine.tell(fault="none")
        worker.terminate()
    log = worker.log.read_text(encoding="utf-8")
    assert all(pages)
    assert b'ticket_router_cache_failures_total{outcome="errors"}' in pages[0], "else Redis was never asked for"
    free_of_secrets(log, *pages)
    for record in desk.records(*desk.rules.output_topics):
        free_of_secrets(record.value or b"", *(value or b"" for _, value in record.headers))


@pytest.mark.kafka
def test_check_and_the_other_commands_print_none_whether_servers_are_there_or_not(desk: Desk) -> None:
    away = {"kafka_bootstrap_servers": NOWHERE, "engine_url": f"http://{NOWHERE}"}
    tls = {**PROPERTIES, "security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"}
    helped = [
        CliRunner().invoke(app, [name, "--help"], env=environment_of(MARKED)) for name in ("run", "check", "serve")
    ]
    found = findings(desk, **settings_from(MARKED))
    with pytest.raises(ConfigError) as told:
        serving.cache_stats(settings_of(desk, **settings_from(MARKED)), desk.folder, 10_000)
    ended = [
        command(desk, "check", **{**MARKED, **away, "kafka_properties": json.dumps(tls)}),
        command(desk, "run", **{**MARKED, "kafka_properties": json.dumps({**tls, "ssl.key.pem": f"{MARK}-key"})}),
        command(desk, "run", **{**MARKED, "kafka_properties": json.dumps({**tls, "no.such": f"{MARK}-value"})}),
    ]
    assert [each.returncode for each in ended] == [1, 2, 2], [each.stdout + each.stderr for each in ended]
    assert {each.exit_code for each in helped} == {0}
    assert found["cache"].state == "warning", "its password was used"
    free_of_secrets(*(each.stdout + each.stderr for each in ended), *(each.output for each in helped))
    free_of_secrets(repr(found), "".join(traceback.format_exception(told.value)))


@pytest.mark.kafka
def test_a_server_over_http_prints_none_and_answers_with_none(desk: Desk) -> None:
    port = free_port()
    health = free_port()
    environment = {
        **os.environ,
        **desk.environment,
        **{f"ROUTER_{name.upper()}": text for name, text in MARKED.items()},
    }
    environment |= {"ROUTER_SERVE_PORT": str(port), "ROUTER_HTTP_PORT": str(health)}
    log = desk.folder / "serve.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(COMMAND), "serve", "--rules", str(desk.folder)], env=environment, stdout=file, stderr=file
        )
    try:
        wait_for(lambda: process.poll() is not None or http(f"http://127.0.0.1:{health}/readyz")[0] == 200, "it", 90)
        answers = []
        for token in (MARKED["serve_token"], "wrong"):
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/decide",
                b'{"id": "a", "text": "trouble with login"}',
                {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            )
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    answers.append((answer.status, answer.read()))
            except urllib.error.HTTPError as error:
                answers.append((error.code, error.read() + str(error.headers).encode()))
        assert [status for status, _ in answers] == [200, 401]
        pages = [http(f"http://127.0.0.1:{health}/{page}")[1] for page in ("metrics", "status", "readyz")]
    finally:
        process.kill()
        process.wait()
    free_of_secrets(log.read_bytes(), *(body for _, body in answers), *pages)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kafka_properties", f'{{"sasl.password": "{MARK}"'),
        ("kafka_properties", f'["{MARK}"]'),
        ("kafka_properties", json.dumps({"sasl.password": [MARK]})),
        ("kafka_properties", json.dumps({"sasl.password": {MARK: MARK}})),
        ("cache_secret", MARK),
        ("serve_token", f"{MARK} with a space in it"),
        ("serve_token", MARK),
        ("serve_token", f"{MARK}-with-ümlaut-in-it"),
        ("engine_url", f"http://user:{MARK}@127.0.0.1:1"),
        ("engine_url", f"{MARK}"),
        ("engine_timeout_s", f"{MARK}"),
    ],
)
def test_a_value_that_is_refused_is_not_quoted(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret in the wrong variable is one, too."""
    monkeypatch.setenv(f"ROUTER_{name.upper()}", value)
    with pytest.raises(ConfigError, match=f"ROUTER_{name.upper()}") as told:
        load_settings()
    free_of_secrets("".join(traceback.format_exception(told.value)))


def test_a_secret_behind_a_misspelt_name_is_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUTER_ENGINE_APIKEY", f"{MARK}-of-the-engine")
    with pytest.raises(ConfigError, match="did you mean ROUTER_ENGINE_API_KEY") as told:
        load_settings()
    free_of_secrets("".join(traceback.format_exception(told.value)))


def test_settings_show_none_in_any_form(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in MARKED.items():
        monkeypatch.setenv(f"ROUTER_{name.upper()}", value)
    settings = load_settings()
    assert settings.kafka_properties["sasl.password"] == PROPERTIES["sasl.password"], "the client gets it"
    free_of_secrets(repr(settings), str(settings), settings.model_dump_json(), str(settings.model_dump()))


def test_a_worker_that_ends_at_its_start_prints_none(tmp_path: Any) -> None:
    """Before anything is set up: the way on which tracebacks come."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROUTER_")}
    environment |= {f"ROUTER_{name.upper()}": value for name, value in MARKED.items()}
    for wrong in ({"ROUTER_CACHE_SECRET": MARK}, {"ROUTER_REDIS_URL": f"redis://:{MARK}/x@h:1/0"}):
        ended = subprocess.run(
            [str(COMMAND), "run", "--rules", str(tmp_path)],
            env={**environment, **wrong},
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
            check=False,
        )
        assert ended.returncode == 2
        free_of_secrets(ended.stdout, ended.stderr)
