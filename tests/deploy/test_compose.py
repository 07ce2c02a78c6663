"""The compose file is valid, names only settings that exist, and starts and stops in an order that loses nothing."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: Mapping[str, Mapping[str, Any]] = COMPOSE["services"]
WORKERS = ["worker", "worker-cpu"]
SERVERS = ["serve", "serve-cpu"]
ENV_EXAMPLE = (ROOT / ".env.example").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")

TOPICS = "topics"
ONE_SHOTS = [TOPICS, "samples"]
WITHOUT_A_PROGRAM_TO_ASK = "otel-collector"
INTERPOLATED = re.compile(r"(?<!\$)\$\{([A-Za-z_][A-Za-z0-9_]*)")


def seconds(duration: str) -> float:
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([0-9.]+)(ms|h|m|s)", duration))


def settings_names() -> set[str]:
    from worker.settings import Settings

    return {f"ROUTER_{name.upper()}" for name in Settings.model_fields}


def example_names() -> set[str]:
    """Every variable of .env.example, the commented ones too."""
    return set(re.findall(r"^(?:# )?([A-Z][A-Z0-9_]*)=", ENV_EXAMPLE, re.MULTILINE))


def stage_lines(name: str) -> list[str]:
    """The Dockerfile's lines that make the named stage, those of the stages it starts from first."""
    stages: dict[str, list[str]] = {}
    current: list[str] = []
    for line in DOCKERFILE.splitlines():
        found = re.match(r"FROM (\S+) AS (\S+)", line)
        if found:
            current = stages[found[2]] = list(stages.get(found[1], ()))
        current.append(line)
    return stages[name]


def test_the_compose_file_follows_the_compose_specification() -> None:
    schema = json.loads((Path(__file__).parent / "compose-spec.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    problems = [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in validator.iter_errors(COMPOSE)
    ]
    assert not problems
    # The schema does refuse: a misspelt key is an error and not an extension.
    broken = {**COMPOSE, "services": {**SERVICES, "redis": {**SERVICES["redis"], "healtcheck": {}}}}
    assert not validator.is_valid(broken)


def test_every_worker_setting_in_the_compose_file_exists() -> None:
    # sglang is handed the key under the worker's name for it, so its environment counts too.
    used = {
        name for service in SERVICES.values() for name in service.get("environment", {}) if name.startswith("ROUTER_")
    }
    used |= set(re.findall(r"\bROUTER_[A-Z_]+\b", DOCKERFILE))
    assert {"ROUTER_KAFKA_BOOTSTRAP_SERVERS", "ROUTER_ENGINE_URL", "ROUTER_CACHE_SECRET"} <= used
    assert not used - settings_names()


def test_every_worker_setting_in_the_example_exists() -> None:
    named = {name for name in example_names() if name.startswith("ROUTER_")}
    assert named
    assert not named - settings_names()


def test_every_variable_the_compose_file_asks_for_is_in_the_example() -> None:
    asked = set(INTERPOLATED.findall(json.dumps({key: COMPOSE[key] for key in COMPOSE if not key.startswith("x-")})))
    assert "ROUTER_CACHE_SECRET" in asked
    assert not asked - example_names()


def test_the_example_is_accepted_once_its_blanks_are_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.settings import load_settings

    filled = re.sub(r"^(ROUTER_\w+)=$", r"\1=0123456789abcdef0123456789abcdef", ENV_EXAMPLE, flags=re.MULTILINE)
    uncommented = re.sub(r"^# ([A-Z][A-Z0-9_]*=)", r"\1", filled, flags=re.MULTILINE)
    (tmp_path / ".env").write_text(uncommented, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    settings = load_settings()
    assert settings.cache_secret is not None
    assert settings.kafka_bootstrap_servers == "localhost:9094"


@pytest.mark.parametrize("name", [*WORKERS, *SERVERS])
def test_each_environment_makes_valid_settings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.settings import load_settings
    from worker.wiring import check_exposure

    monkeypatch.chdir(tmp_path)
    for key, value in SERVICES[name]["environment"].items():
        monkeypatch.setenv(key, "0123456789abcdef0123456789abcdef" if value.startswith("${") else value)
    settings = load_settings()
    assert settings.engine == ("llama_cpp" if name.endswith("-cpu") else "sglang")
    if name in SERVERS:
        check_exposure(settings)  # it starts on an address that others reach
        assert f"127.0.0.1:{settings.serve_port}:{settings.serve_port}" in SERVICES[name]["ports"]


@pytest.mark.parametrize("name", [*WORKERS, *SERVERS, *ONE_SHOTS])
def test_every_command_is_one_that_the_program_has(name: str) -> None:
    import typer.main

    from worker.cli import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    command, *arguments = SERVICES[name]["command"]
    known = {option for parameter in commands[command].params for option in parameter.opts}
    assert {argument for argument in arguments if argument.startswith("--")} <= known


@pytest.mark.parametrize("name", sorted(set(SERVICES) - {*ONE_SHOTS, WITHOUT_A_PROGRAM_TO_ASK}))
def test_every_lasting_service_has_a_health_check_and_comes_back(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    assert check["test"][0] == "CMD"
    assert seconds(check["timeout"]) < seconds(check["interval"]) * 2
    assert SERVICES[name]["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", WORKERS)
def test_the_workers_start_after_what_they_need(name: str) -> None:
    needs = {key: value["condition"] for key, value in SERVICES[name]["depends_on"].items()}
    assert needs.pop(TOPICS) == "service_completed_successfully"
    assert needs.pop("redis") == "service_healthy"
    # Never `service_healthy` for the engine: the worker waits for it by itself, and a long download is no failure.
    assert needs == ({"sglang": "service_started"} if name == "worker" else {})
    assert SERVICES[TOPICS]["depends_on"]["kafka"]["condition"] == "service_healthy"


@pytest.mark.parametrize("name", SERVERS)
def test_the_servers_over_http_need_no_broker(name: str) -> None:
    needs = {key: value["condition"] for key, value in SERVICES[name]["depends_on"].items()}
    assert needs.pop("redis") == "service_healthy"
    assert needs == ({"sglang": "service_started"} if name == "serve" else {})


def test_nothing_waits_for_what_has_no_health_check_to_be_healthy() -> None:
    for name, service in SERVICES.items():
        for needed, how in service.get("depends_on", {}).items():
            checked = "test" in SERVICES[needed].get("healthcheck", {})
            assert how["condition"] != "service_healthy" or checked, f"{name} waits for {needed}"


def test_both_profiles_hold_the_whole_system() -> None:
    always = {name for name, service in SERVICES.items() if "profiles" not in service}
    assert always == {"kafka", "redis", "topics", "otel-collector", "prometheus", "grafana"}
    chosen = {name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service}
    assert chosen == {
        "worker": ["gpu"],
        "serve": ["gpu"],
        "sglang": ["gpu"],
        "worker-cpu": ["cpu"],
        "serve-cpu": ["cpu"],
        "samples": ["samples"],
    }


@pytest.mark.parametrize(("name", "services"), [("ticket-router", WORKERS), ("ticket-router-serve", SERVERS)])
def test_prometheus_finds_the_services_of_both_profiles(name: str, services: list[str]) -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    (job,) = [job for job in config["scrape_configs"] if job["job_name"] == name]
    (found,) = job["dns_sd_configs"]
    assert sorted(found["names"]) == sorted(services)
    assert {str(found["port"])} == {SERVICES[name]["environment"]["ROUTER_HTTP_PORT"] for name in services}


def test_services_send_their_traces_where_the_collector_listens() -> None:
    config = yaml.safe_load((ROOT / "deploy/otel/collector.yaml").read_text(encoding="utf-8"))
    port = config["receivers"]["otlp"]["protocols"]["http"]["endpoint"].rpartition(":")[2]
    used = {
        part for pipeline in config["service"]["pipelines"].values() for parts in pipeline.values() for part in parts
    }
    assert used == {*config["receivers"], *config["processors"], *config["exporters"]}
    for name in (*WORKERS, *SERVERS):
        assert SERVICES[name]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == f"http://otel-collector:{port}"


def test_everything_that_is_mounted_is_in_the_repository_or_a_volume() -> None:
    for name, service in SERVICES.items():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], name


def test_no_secret_is_written_down() -> None:
    for service in SERVICES.values():
        for key, value in service.get("environment", {}).items():
            if re.search("SECRET|PASSWORD|KEY", key):
                assert value.startswith("${") or key.endswith("__FILE"), key
    asked = {secret["environment"] for secret in COMPOSE["secrets"].values()}
    assert asked <= example_names()
    assert {name for service in SERVICES.values() for name in service.get("secrets", ())} == set(COMPOSE["secrets"])


def test_the_samples_that_are_sent_in_are_there() -> None:
    command = SERVICES["samples"]["command"]
    path = command[command.index("--tickets") + 1].replace("${RULE_SET:-helpdesk}", "helpdesk")
    assert (ROOT / "routing_rules" / path.removeprefix("/rules/")).is_file()
    assert SERVICES["samples"]["depends_on"] == {TOPICS: {"condition": "service_completed_successfully"}}


def test_the_dockerfile_has_nothing_that_hadolint_would_change() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.is_file():
        pytest.skip("hadolint is packaged for x86-64 only")
    ended = subprocess.run(
        [hadolint, ROOT / "deploy/Dockerfile"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_has_time_to_drain_before_it_is_killed(name: str) -> None:
    from worker.settings import Settings

    drain_s = Settings.model_fields["drain_s"].default
    # Ten seconds more to settle what the drain has finished and to leave the group.
    assert seconds(SERVICES[name]["stop_grace_period"]) >= drain_s + 10.0


def test_no_profile_misses_a_service_that_it_depends_on() -> None:
    for name, service in SERVICES.items():
        for needed in service.get("depends_on", {}):
            profiles = set(SERVICES[needed].get("profiles", ()))
            assert not profiles or profiles >= set(service.get("profiles", ())), f"{name} needs {needed}"


@pytest.mark.parametrize("name", [*WORKERS, *SERVERS, *ONE_SHOTS])
def test_the_worker_runs_without_privileges(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    users = [line.split()[1] for line in stage_lines(service["build"]["target"]) if line.startswith("USER ")]
    assert re.fullmatch(r"[1-9][0-9]*:[1-9][0-9]*", users[-1])
    assert "user" not in service


@pytest.mark.parametrize("name", [*WORKERS, *SERVERS, *ONE_SHOTS])
def test_images_are_built_from_this_repository(name: str) -> None:
    build = SERVICES[name]["build"]
    assert (ROOT / build["context"] / build["dockerfile"]).is_file()
    assert SERVICES[name]["image"] == f"ticket-router:{build['target']}"
    assert SERVICES[name]["pull_policy"] == "build"


def test_ports_are_published_on_this_machine_only() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_redis_drops_the_least_used_instead_of_refusing() -> None:
    command = shlex.join(SERVICES["redis"]["command"])
    assert "--maxmemory 256mb" in command
    assert "--maxmemory-policy allkeys-lru" in command


@pytest.mark.parametrize("target", ["runtime", "embedded"])
def test_images_hold_what_the_lock_files_say_and_nothing_that_builds(target: str) -> None:
    lines = stage_lines(target)
    assert not [
        line for line in lines if re.search(r"\b(pip|uv|gcc|build-essential)\b", line) and line.startswith("RUN")
    ]
    installs = re.findall(r"pip (?:\S+ )*?install [^&\n]*", DOCKERFILE)
    assert installs
    assert all("--require-hashes" in line or "--no-index" in line for line in installs)
    assert 'ENTRYPOINT ["ticket-router"]' in lines


def test_everything_the_dockerfile_copies_is_sent_to_the_builder() -> None:
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_in = {line[1:].removesuffix("/**") for line in ignore if line.startswith("!")}
    copied = {
        source
        for line in DOCKERFILE.splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert "worker" in copied
    assert not {source for source in copied if source not in let_in and not lock_file(source, let_in)}
    assert "*" in ignore


def lock_file(source: str, let_in: set[str]) -> bool:
    return "requirements/*.lock" in let_in and re.fullmatch(r"requirements/\w+\.lock", source) is not None
