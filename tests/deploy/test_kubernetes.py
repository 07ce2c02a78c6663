"""The manifests as a real kustomize builds them: valid, restricted, and safe for a consumer group."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.servers.programs import kustomize
from worker.settings import Settings

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
KEDA = yaml.safe_load(Path(__file__).with_name("keda-scaledobjects.yaml").read_text(encoding="utf-8"))
VERSIONS = ("1.33", "1.37")
"""The oldest and the newest release whose schemas the manifests are held against."""
BUILDS = ("overlays/cpu", "overlays/gpu", "topics")
OVERLAYS = ("overlays/cpu", "overlays/gpu")

Manifest = Mapping[str, Any]


def build(folder: Path) -> list[Manifest]:
    ended = subprocess.run([kustomize(), "build", folder], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return list(yaml.safe_load_all(ended.stdout))


@pytest.fixture(scope="module")
def built() -> Mapping[str, list[Manifest]]:
    return {name: build(KUBERNETES / name) for name in BUILDS}


def the(manifests: list[Manifest], kind: str, name: str) -> Any:
    (found,) = [m for m in manifests if m["kind"] == kind and re.fullmatch(f"{name}(-[a-z0-9]{{10}})?", _name(m))]
    return found


def _name(manifest: Manifest) -> str:
    name: str = manifest["metadata"]["name"]
    return name


def pod_of(manifest: Manifest) -> Any:
    return manifest["spec"]["template"]["spec"]


def pods(manifests: list[Manifest]) -> list[tuple[str, Any]]:
    return [(_name(m), pod_of(m)) for m in manifests if m["kind"] in {"Deployment", "Job"}]


def closed(schema: Any) -> Any:
    """The schema of a custom resource, with every key refused that it does not name."""
    if isinstance(schema, dict):
        schema = {key: closed(value) for key, value in schema.items()}
        if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        return schema
    return [closed(value) for value in schema] if isinstance(schema, list) else schema


def keda_problems(manifest: Manifest) -> list[str]:
    (version,) = [v for v in KEDA["spec"]["versions"] if v["name"] == "v1alpha1"]
    schema = copy.deepcopy(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    validator = jsonschema.Draft202012Validator(closed(schema))
    return [f"{'.'.join(map(str, e.absolute_path))}: {e.message}" for e in validator.iter_errors(manifest)]


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_follow_the_schemas_of_kubernetes_and_keda(
    built: Mapping[str, list[Manifest]], name: str, version: str
) -> None:
    for manifest in built[name]:
        if manifest["kind"] == "ScaledObject":
            assert not keda_problems(manifest)
        else:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_the_schemas_refuse_what_is_misspelt(built: Mapping[str, list[Manifest]]) -> None:
    deployment = copy.deepcopy(the(built["overlays/cpu"], "Deployment", "worker"))
    pod_of(deployment)["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSIONS[-1], strict=True)
    scaled = copy.deepcopy(the(built["overlays/cpu"], "ScaledObject", "worker"))
    scaled["spec"]["maxReplicas"] = 3
    assert keda_problems(scaled)


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_change_of_rules_is_a_rollout(built: Mapping[str, list[Manifest]], name: str, tmp_path: Path) -> None:
    def rules_of(manifests: list[Manifest]) -> list[str]:
        pods = [pod_of(the(manifests, "Deployment", who)) for who in ("worker", "serve")]
        return [v["configMap"]["name"] for pod in pods for v in pod["volumes"] if v["name"] == "rules"]

    before = rules_of(built[name])
    shutil.copytree(ROOT / "routing_rules", tmp_path / "routing_rules")
    shutil.copytree(KUBERNETES, tmp_path / "deploy/kubernetes")
    rules = tmp_path / "routing_rules/helpdesk/rules.yaml"
    rules.write_text(rules.read_text(encoding="utf-8") + "# changed\n", encoding="utf-8")
    manifests = build(tmp_path / "deploy/kubernetes" / name)
    after = rules_of(manifests)
    assert after == [_name(the(manifests, "ConfigMap", "rule-set"))] * 2
    assert not set(after) & set(before)


def test_every_rule_set_can_be_mounted_whole() -> None:
    for folder in sorted((ROOT / "routing_rules").iterdir()):
        (made,) = build(folder)
        assert _name(made).startswith("rule-set-")
        files = {path.name for path in folder.iterdir() if path.is_file()} - {"kustomization.yaml", "README.md"}
        assert set(made["data"]) == files, f"list what is missing in {folder / 'kustomization.yaml'}"
        assert sum(map(len, made["data"].values())) < 1_000_000  # what a ConfigMap holds


@pytest.mark.parametrize("name", BUILDS)
def test_pods_run_under_the_restricted_standard(built: Mapping[str, list[Manifest]], name: str) -> None:
    for who, pod in pods(built[name]):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False  # a Service called `router` would set ROUTER_* variables
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False, who
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]
        mounted = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert "/tmp" in mounted
        if who != "sglang":
            assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    namespaces = [m for m in built[name] if m["kind"] == "Namespace"]
    assert all(n["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted" for n in namespaces)


@pytest.mark.parametrize("name", BUILDS)
def test_users_are_those_of_the_image(built: Mapping[str, list[Manifest]], name: str) -> None:
    user = re.findall(r"^USER (\d+):(\d+)$", (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    for _, pod in pods(built[name]):
        assert (str(pod["securityContext"]["runAsUser"]), str(pod["securityContext"]["runAsGroup"])) in user


@pytest.mark.parametrize("name", OVERLAYS)
@pytest.mark.parametrize("who", ["worker", "serve"])
def test_there_is_time_to_drain_before_the_kill(built: Mapping[str, list[Manifest]], name: str, who: str) -> None:
    settings = the(built[name], "ConfigMap", "worker-settings")["data"]
    pod = pod_of(the(built[name], "Deployment", who))
    (container,) = pod["containers"]
    wait = re.findall(r"sleep\((\d+)\)", str(container.get("lifecycle", {})))
    assert len(wait) == (who == "serve")
    # Ten seconds more to settle what the drain has finished and to leave the group.
    assert pod["terminationGracePeriodSeconds"] >= float(settings["ROUTER_DRAIN_S"]) + sum(map(int, wait)) + 10


@pytest.mark.parametrize("name", OVERLAYS)
@pytest.mark.parametrize("who", ["worker", "serve"])
def test_a_pod_is_restarted_when_it_hangs_and_never_for_what_it_waits_for(
    built: Mapping[str, list[Manifest]], name: str, who: str
) -> None:
    (container,) = pod_of(the(built[name], "Deployment", who))["containers"]
    paths = {
        probe: container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert paths == {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    port = the(built[name], "ConfigMap", "worker-settings")["data"]["ROUTER_HTTP_PORT"]
    assert [p["containerPort"] for p in container["ports"] if p["name"] == "http"] == [int(port)]


@pytest.mark.parametrize("name", OVERLAYS)
def test_there_are_never_more_workers_than_partitions(built: Mapping[str, list[Manifest]], name: str) -> None:
    scaled = the(built[name], "ScaledObject", "worker")["spec"]
    arguments = pod_of(the(built["topics"], "Job", "topics"))["containers"][0]["args"]
    partitions = int(arguments[arguments.index("--partitions") + 1])
    assert scaled["maxReplicaCount"] <= partitions
    deployment = the(built[name], "Deployment", "worker")["spec"]
    assert deployment["strategy"]["rollingUpdate"]["maxSurge"] == 0
    assert "replicas" not in deployment  # they are the ScaledObject's
    (trigger,) = scaled["triggers"]
    assert trigger["metadata"]["allowIdleConsumers"] == "false"


@pytest.mark.parametrize("name", OVERLAYS)
def test_workers_are_scaled_by_the_lag_of_their_own_group(built: Mapping[str, list[Manifest]], name: str) -> None:
    from worker.adapters.files import load_rule_set

    settings = the(built[name], "ConfigMap", "worker-settings")["data"]
    (trigger,) = the(built[name], "ScaledObject", "worker")["spec"]["triggers"]
    assert trigger["metadata"]["consumerGroup"] == settings["ROUTER_KAFKA_GROUP_ID"]
    assert trigger["metadata"]["bootstrapServers"] == settings["ROUTER_KAFKA_BOOTSTRAP_SERVERS"]
    assert trigger["metadata"]["topic"] == load_rule_set(ROOT / "routing_rules/helpdesk").input_topic


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_of_a_deployment_are_no_static_members(built: Mapping[str, list[Manifest]], name: str) -> None:
    (container,) = pod_of(the(built[name], "Deployment", "worker"))["containers"]
    named = {*the(built[name], "ConfigMap", "worker-settings")["data"], *(e["name"] for e in container.get("env", ()))}
    assert "ROUTER_KAFKA_GROUP_INSTANCE_ID" not in named


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_server_over_http_is_reached_by_its_service_and_token_and_no_worker_has_that(
    built: Mapping[str, list[Manifest]], name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from worker.settings import load_settings
    from worker.wiring import check_exposure

    pod = the(built[name], "Deployment", "serve")["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    monkeypatch.chdir(tmp_path)
    for key, value in the(built[name], "ConfigMap", "worker-settings")["data"].items():
        monkeypatch.setenv(key, value)
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    monkeypatch.setenv("ROUTER_SERVE_TOKEN", "as the secret has it, 0123456789abcdef".replace(" ", "-"))
    settings = load_settings()
    check_exposure(settings)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": settings.http_port, "decide": settings.serve_port}
    service = the(built[name], "Service", "serve")["spec"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert ports[service["ports"][0]["targetPort"]] == settings.serve_port
    asked_at = [
        port["port"] for rule in the(built[name], "NetworkPolicy", "serve")["spec"]["ingress"] for port in rule["ports"]
    ]
    assert sorted(asked_at) == sorted(ports.values())
    secrets = {
        who: {s["secretRef"]["name"] for s in c["envFrom"] if "secretRef" in s}
        for who, c in (
            ("serve", container),
            ("worker", pod_of(the(built[name], "Deployment", "worker"))["containers"][0]),
        )
    }
    assert secrets["serve"] - secrets["worker"] == {"ticket-router-serve"}


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_rollout_of_the_server_over_http_leaves_nobody_without_an_answer(
    built: Mapping[str, list[Manifest]], name: str
) -> None:
    spec = the(built[name], "Deployment", "serve")["spec"]
    assert spec["replicas"] >= 2
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert the(built[name], "PodDisruptionBudget", "serve")["spec"]["maxUnavailable"] == 1


@pytest.mark.parametrize("name", BUILDS)
def test_every_setting_exists_and_no_secret_is_written_down(built: Mapping[str, list[Manifest]], name: str) -> None:
    fields = {f"ROUTER_{field.upper()}": info for field, info in Settings.model_fields.items()}
    secret = {variable for variable, info in fields.items() if "Secret" in str(info.annotation)}
    plain: set[str] = set()
    for manifest in built[name]:
        assert manifest["kind"] != "Secret"
        if manifest["kind"] == "ConfigMap":
            plain |= {key for key in manifest["data"] if key.startswith("ROUTER_")}
    for _, pod in pods(built[name]):
        for variable in pod["containers"][0].get("env", ()):
            assert not variable["name"].startswith("ROUTER_") or variable["name"] in fields
            if "value" in variable:
                plain.add(variable["name"])
    assert not {key for key in plain if key.startswith("ROUTER_")} - set(fields)
    assert "ROUTER_CACHE_SECRET" in secret
    assert not plain & secret


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_settings_of_the_config_map_are_accepted(
    built: Mapping[str, list[Manifest]], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from worker.settings import load_settings

    monkeypatch.chdir(tmp_path)
    for key, value in the(built[name], "ConfigMap", "worker-settings")["data"].items():
        monkeypatch.setenv(key, value)
    assert load_settings().engine == {"overlays/cpu": "llama_cpp", "overlays/gpu": "sglang"}[name]


@pytest.mark.parametrize("name", BUILDS)
def test_every_command_is_one_that_the_program_has(built: Mapping[str, list[Manifest]], name: str) -> None:
    import typer.main

    from worker.cli import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for who, pod in pods(built[name]):
        if who == "sglang":
            continue
        command, *arguments = pod["containers"][0]["args"]
        known = {option for parameter in commands[command].params for option in parameter.opts}
        assert {argument for argument in arguments if argument.startswith("--")} <= known


@pytest.mark.parametrize("name", OVERLAYS)
def test_selectors_select_the_pods_that_they_mean(built: Mapping[str, list[Manifest]], name: str) -> None:
    labels = {_name(m): m["spec"]["template"]["metadata"]["labels"] for m in built[name] if m["kind"] == "Deployment"}
    for kind, path in (
        ("NetworkPolicy", "podSelector"),
        ("PodDisruptionBudget", "selector"),
        ("Deployment", "selector"),
    ):
        for manifest in (m for m in built[name] if m["kind"] == kind):
            wanted = manifest["spec"][path]["matchLabels"]
            chosen = [who for who, has in labels.items() if wanted.items() <= has.items()]
            assert chosen == [_name(manifest)], kind
    assert {_name(m) for m in built[name] if m["kind"] == "NetworkPolicy"} == set(labels)


def test_an_outage_of_the_engine_blocks_no_node_from_being_drained(built: Mapping[str, list[Manifest]]) -> None:
    budget = the(built["overlays/gpu"], "PodDisruptionBudget", "worker")["spec"]
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_the_engine_computes_its_last_layer_in_full_precision_behind_a_plain_service(
    built: Mapping[str, list[Manifest]],
) -> None:
    manifests = built["overlays/gpu"]
    pod = pod_of(the(manifests, "Deployment", "sglang"))
    (container,) = pod["containers"]
    assert "--enable-fp32-lm-head" in container["args"]
    assert "sglang.launch_server" in container["command"]  # its router does not serve /v1/score
    assert container["image"].partition(":")[2].startswith("v0.5.")
    service = the(manifests, "Service", "sglang")["spec"]
    assert service["ports"][0]["port"] == 30000
    assert (
        service["selector"].items()
        <= the(manifests, "Deployment", "sglang")["spec"]["template"]["metadata"]["labels"].items()
    )
    settings = the(manifests, "ConfigMap", "worker-settings")["data"]
    assert settings["ROUTER_ENGINE_URL"] == f"http://{_name(the(manifests, 'Service', 'sglang'))}:30000"
    model = the(manifests, "ConfigMap", "sglang-settings")["data"]["MODEL_PATH"]
    assert model.startswith(tuple(mount["mountPath"] for mount in container["volumeMounts"]))
    for who in ("worker", "serve"):
        egress = the(manifests, "NetworkPolicy", who)["spec"]["egress"]
        assert len([rule for rule in egress if rule["ports"] == [{"port": 30000}]]) == 1
    (ingress,) = the(manifests, "NetworkPolicy", "sglang")["spec"]["ingress"]
    allowed = {peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in ingress["from"]}
    assert allowed == {"worker", "serve"}
