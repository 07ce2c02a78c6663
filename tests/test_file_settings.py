"""Settings that name files: whatever is wrong with a file, the error says which setting names it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import get_args

import pytest

from tests.adapters.test_kafka_client import LISTENER
from tests.core.sets import rule_set
from worker.adapters.files import load_rule_set
from worker.adapters.kafka_topics import describe_topics
from worker.adapters.llama_cpp import import_xllamacpp
from worker.adapters.tiered_cache import TieredCache
from worker.errors import ConfigError, RuleSetError
from worker.settings import PREFIX, Settings, load_settings
from worker.wiring.cache import make_cache
from worker.wiring.engines import make_engines, make_sent
from worker.wiring.kafka import kafka_config, make_stream

NOWHERE = "127.0.0.1:1"
BROKEN: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "folder": lambda path: path.mkdir(),
    "unreadable": lambda path: path.symlink_to(path),  # root may read what has no permissions, but no ring of links
    "below a file": lambda path: path.parent.rmdir() or path.parent.touch(),  # type: ignore[func-returns-value]
    "empty": lambda path: path.touch(),
    "text": lambda path: path.write_text("no such thing\n"),
    "other JSON": lambda path: path.write_text('{"added_tokens": []}'),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00"),
}


async def ca(path: Path) -> None:
    make_engines(Settings(engine_url=f"https://{NOWHERE}", engine_ca_file=path))


async def local_tokenizer(path: Path) -> None:
    pytest.importorskip("tokenizers")
    make_sent(Settings(engine_url=f"http://{NOWHERE}", tokenizer_file=path))


async def embedded_model(path: Path) -> None:
    try:
        import_xllamacpp()
    except ConfigError:
        pytest.skip("the embedded engine is not installed")
    ((_, engine),) = make_engines(Settings(engine="llama_cpp", engine_model_path=path))
    try:
        await engine.probe()
    finally:
        await engine.aclose()


SETTINGS: dict[str, Callable[[Path], Awaitable[None]]] = {
    "engine_ca_file": ca,
    "tokenizer_file": local_tokenizer,
    "engine_model_path": embedded_model,
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder" / "named.file"


def test_every_setting_that_names_a_file_is_tried() -> None:
    kinds = {name: (field.annotation, *get_args(field.annotation)) for name, field in Settings.model_fields.items()}
    assert {name for name, kind in kinds.items() if Path in kind} == set(SETTINGS)


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("setting", SETTINGS)
async def test_an_error_about_a_file_names_the_setting_and_the_file(setting: str, broken: str, place: Path) -> None:
    BROKEN[broken](place)
    with pytest.raises(ConfigError) as told:
        await SETTINGS[setting](place)
    said = str(told.value)
    assert said.startswith(f"{PREFIX}{setting.upper()} {place}: "), said
    assert "\n" not in said and "Errno" not in said


@pytest.mark.parametrize("broken", [name for name in BROKEN if name != "folder"])
@pytest.mark.parametrize("which", ["ssl.ca.location", "ssl.certificate.location", "ssl.key.location"])
def test_an_error_about_a_file_of_the_kafka_client_names_setting_and_property(
    which: str, broken: str, place: Path
) -> None:
    """A folder may hold authorities, each in a file of its own."""
    BROKEN[broken](place)
    named = {"security.protocol": "SSL", which: str(place)}
    settings = Settings(kafka_bootstrap_servers=NOWHERE, kafka_properties=named)
    rules = rule_set()
    for opens in (
        lambda: make_stream(settings, rules).open(LISTENER),
        lambda: describe_topics(kafka_config(settings, rules), ["desk"], 1.0),
    ):
        with pytest.raises(ConfigError, match=rf"ROUTER_KAFKA_PROPERTIES.*{re.escape(which)} failed"):
            opens()


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("which", ["ssl_ca_certs", "ssl_certfile"])
async def test_trouble_with_a_file_of_the_cache_names_setting_and_parameter(
    which: str, broken: str, place: Path
) -> None:
    BROKEN[broken](place)
    url = f"rediss://{NOWHERE}?{which}={place}"
    cache = make_cache(Settings(redis_url=url, redis_timeout_ms=10_000, cache_secret="x" * 32), b"x" * 32)
    assert isinstance(cache, TieredCache)
    try:
        said = await cache.far.probe()
    finally:
        await cache.aclose()
    assert said is not None and "ROUTER_REDIS_URL names cannot be" in said and which in said
    assert "redis://" not in said and str(place) not in said, "the address may hold a password"


@pytest.mark.parametrize("to", ["questions.yaml", "nowhere"])
def test_questions_behind_a_link_that_leads_nowhere_are_not_left_out_silently(to: str, tmp_path: Path) -> None:
    folder = tmp_path / "helpdesk"
    shutil.copytree(Path(__file__).parents[1] / "routing_rules/helpdesk", folder)
    (folder / "questions.yaml").symlink_to(folder / to)
    with pytest.raises(RuleSetError, match=r"questions\.yaml: cannot be read"):
        load_rule_set(folder)


@pytest.mark.parametrize("broken", ["bytes", "unreadable"])
def test_what_is_wrong_with_the_file_of_settings_is_said_of_it(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.upper().startswith(PREFIX):
            monkeypatch.delenv(name)
    BROKEN["bytes"](tmp_path / ".env")
    if broken == "unreadable":

        def refused(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied", ".env")

        monkeypatch.setattr("dotenv.main.open", refused, raising=False)
    with pytest.raises(ConfigError, match=r"^\.env: (no UTF-8|cannot be read)"):
        load_settings()
