"""Settings: unknown names stop the worker, bounds hold, and no secret is ever shown."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from worker.errors import ConfigError
from worker.settings import PREFIX, Settings, describe, load_settings
from worker.wiring import make_engines

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
SECRET = "hunter2-hunter2-hunter2"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No ROUTER_* from outside, and a working directory without `.env`."""
    for name in os.environ:
        if name.upper().startswith(PREFIX):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_without_any_variable_the_defaults_hold() -> None:
    settings = load_settings()
    assert settings.engine == "sglang"
    assert settings.max_in_flight_bytes == 64 * 1024 * 1024
    assert settings.cache_ttl_s == 604_800
    assert settings.redis_url is None
    assert settings.kafka_properties == {}


def test_the_environment_wins_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".env").write_text("ROUTER_BATCH_ITEMS=8\nROUTER_DRAIN_S=3\n")
    monkeypatch.setenv("ROUTER_BATCH_ITEMS", "16")
    settings = load_settings()
    assert (settings.batch_items, settings.drain_s) == (16, 3.0)


def test_what_belongs_to_others_in_the_file_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".env").write_text("COMPOSE_PROJECT_NAME=desk\nROUTER_BATCH_ITEMS=8\nbatch_items=9\n")
    assert load_settings().batch_items == 8


@pytest.mark.parametrize("source", ["environment", "file"])
def test_an_unknown_name_is_an_error_that_suggests_the_nearest(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    if source == "file":
        Path(".env").write_text("ROUTER_BATCH_ITEM=8\n")
    else:
        monkeypatch.setenv("router_batch_item", "8")
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert "ROUTER_BATCH_ITEM (did you mean ROUTER_BATCH_ITEMS?)" in str(caught.value)


def test_an_unknown_argument_is_an_error() -> None:
    with pytest.raises(ValueError, match="batch_item"):
        Settings(batch_item=8)  # type: ignore[call-arg]


def test_an_empty_value_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUTER_REDIS_URL", "")
    monkeypatch.setenv("ROUTER_BATCH_ITEMS", "")
    assert load_settings().redis_url is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ROUTER_BATCH_ITEMS", "0"),
        ("ROUTER_BATCH_ITEMS", "many"),
        ("ROUTER_BATCH_WAIT_MS", "nan"),
        ("ROUTER_DRAIN_S", "inf"),
        ("ROUTER_HTTP_PORT", "65536"),
        ("ROUTER_ENGINE", "gpt"),
        ("ROUTER_ENGINE_URL", "localhost:30000"),
        ("ROUTER_ENGINE_URL", "http://"),
        ("ROUTER_ENGINE_URL", "http://a:30000,b:30000"),
        ("ROUTER_ENGINE_URL", "http://a:30000, http://a:30000/"),
        ("ROUTER_ENGINE_URL", ","),
        ("ROUTER_ENGINE_URL", "http://[::1"),
        ("ROUTER_ON_ENGINE_DOWN", "guess"),
        ("ROUTER_CACHE_SECRET", "short"),
        ("ROUTER_KAFKA_PROPERTIES", "{security.protocol: x}"),
        ("ROUTER_KAFKA_PROPERTIES", '{"a": [1]}'),
        ("ROUTER_MAX_TICKET_BYTES", "100000000"),
    ],
)
def test_a_value_out_of_bounds_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        load_settings()


@pytest.mark.parametrize("port", ["99999", "0", "-1", "80a", "8" * 5000])
@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("ROUTER_ENGINE_URL", "http://a:{}"),
        ("ROUTER_ENGINE_URL", "http://a:1,http://[::1]:{}/v1"),
        ("ROUTER_REDIS_URL", f"redis://user:{SECRET}@a:{{}}/0"),
        ("ROUTER_KAFKA_BOOTSTRAP_SERVERS", "a:9092, b:{}"),
        ("ROUTER_KAFKA_BOOTSTRAP_SERVERS", "[::1]:{}"),
    ],
)
def test_a_port_that_cannot_be_names_the_setting_and_no_address(
    monkeypatch: pytest.MonkeyPatch, name: str, address: str, port: str
) -> None:
    monkeypatch.setenv(name, address.format(port))
    with pytest.raises(ConfigError, match=f"^{name}: the port is none: write a number from 1 to 65535$"):
        load_settings()


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("ROUTER_ENGINE_URL", "http://a,https://b:65535,http://[::1]:1"),
        ("ROUTER_REDIS_URL", "rediss://user:pass:word@[::1]/0"),
        ("ROUTER_KAFKA_BOOTSTRAP_SERVERS", "a,b:9092,[::1]:9092,[::1],SASL_SSL://c:1"),
    ],
)
def test_addresses_with_and_without_a_port_are_taken(monkeypatch: pytest.MonkeyPatch, name: str, address: str) -> None:
    monkeypatch.setenv(name, address)
    load_settings()


def test_every_error_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUTER_BATCH_ITEMS", "0")
    monkeypatch.setenv("ROUTER_HTTP_PORT", "-1")
    with pytest.raises(ConfigError, match=r"ROUTER_BATCH_ITEMS: .*; ROUTER_HTTP_PORT: "):
        load_settings()


def test_no_secret_is_shown() -> None:
    properties: dict[str, Any] = {"sasl.username": "desk", "sasl.password": SECRET, "ssl.key.pem": SECRET}
    settings = Settings(
        redis_url=SecretStr(f"redis://:{SECRET}@host"),
        cache_secret=SecretStr(SECRET),
        engine_api_key=SecretStr(SECRET),
        kafka_properties=properties,
    )
    shown = [repr(settings), str(settings), repr(settings.kafka_properties), str(settings.kafka_properties)]
    shown += [repr(settings.model_dump()), settings.model_dump_json(), f"{settings.kafka_properties}"]
    for text in shown:
        assert "hunter2" not in text
        assert "SecretStr" in text or "desk" in text
    assert settings.kafka_properties == properties, "the client gets them whole"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ROUTER_ENGINE_URL", f"http://user:{SECRET}@host:1"),
        ("ROUTER_ENGINE_URL", f"http://host:1,http://user:{SECRET}@host:2"),
        ("ROUTER_ENGINE_URL", f"http://[{SECRET}"),
        ("ROUTER_KAFKA_PROPERTIES", f'{{"sasl.password": "{SECRET}"'),
        ("ROUTER_KAFKA_PROPERTIES", f'{{"sasl.password": ["{SECRET}"]}}'),
        ("ROUTER_BATCH_ITEMS", SECRET),
    ],
)
def test_no_error_quotes_a_value(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name) as caught:
        load_settings()
    assert "hunter2" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_trailing_slash_of_the_engine_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUTER_ENGINE_URL", "http://localhost:30000/")
    assert load_settings().engine_url == "http://localhost:30000"


def test_several_engines_are_one_variable_and_an_adapter_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUTER_ENGINE_URL", "http://one:30000/, https://two/v,http://[::1]:30000,")
    settings = load_settings()
    assert settings.engine_url == "http://one:30000,https://two/v,http://[::1]:30000"
    assert [name for name, _ in make_engines(settings)] == ["engine-1", "engine-2", "engine-3"]


def test_client_properties_keep_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"security.protocol": "SASL_SSL", "fetch.min.bytes": 10, "log.connection.close": False}
    monkeypatch.setenv("ROUTER_KAFKA_PROPERTIES", json.dumps(given))
    read = dict(load_settings().kafka_properties)
    assert read == given
    assert [type(value) for value in read.values()] == [str, int, bool]


def test_every_field_has_a_description_and_every_number_a_unit_and_bounds() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name
        if field.annotation in (int, float):
            rules = {rule for entry in field.metadata for rule in ("ge", "gt", "le") if hasattr(entry, rule)}
            assert "le" in rules, name
            assert rules & {"ge", "gt"}, name
            counted = r"_(ms|s|bytes|items|concurrency|connections|attempts|threads|flight|port)$"
            assert re.search(counted, name) or name == "dead_letter_limit", name  # a share, 0 to 1


def test_the_page_is_what_the_settings_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == describe(), "write it anew with worker.settings.describe()"
