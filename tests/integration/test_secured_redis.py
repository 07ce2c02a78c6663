"""Redis with TLS and users: what worker and operator need is what docs/deploying.md lists, and no more."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import NoPermissionError

from tests.integration.desk import Desk
from tests.integration.secured import command, findings, settings_of, users_of_redis
from tests.servers.redis_server import redis_server
from tests.servers.tls import Authority, authority
from worker import serving
from worker.adapters import redis_upkeep
from worker.adapters.redis_cache import KEY_PREFIX, RedisCache
from worker.core.scores import LabelScores
from worker.errors import ConfigError
from worker.ports import Lease

PASSWORD = "s3cret-of-redis"
WORKER, OPERATOR = "ticket-router", "ticket-router-operator"
ADMIN = f"user admin on >{PASSWORD} ~* &* +@all"
SCORES = LabelScores((-0.5, -1.5), 0.8)


def listed(user: str) -> list[str]:
    """The words of the user's line in docs/deploying.md."""
    (line,) = (line for line in users_of_redis() if line.startswith(f"user {user} "))
    return line.split()


def allowed(user: str) -> list[str]:
    return [word for word in listed(user) if word.startswith("+")]


@dataclass(frozen=True, slots=True)
class Secured:
    address: str
    tls: Authority

    def url(self, user: str, password: str = PASSWORD, ca: Path | None = None) -> str:
        place = self.address.removeprefix("rediss://")
        return f"rediss://{user}:{password}@{place}?ssl_ca_certs={ca or self.tls.authority}"

    def client(self, user: str) -> Any:
        return Redis.from_url(self.url(user), protocol=2)

    def without(self, user: str, word: str) -> str:
        """The name of a user who may do all that this one may but one."""
        name = f"{user}-without-{word.lstrip('+').replace('|', '-')}"
        rules = [f">{PASSWORD}" if rule == ">password" else rule for rule in listed(user)[2:] if rule != word]
        self.client("admin").execute_command("ACL", "SETUSER", name, *rules)
        return name


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured-redis")
    tls = authority(folder)
    users = folder / "users.acl"
    lines = [line.replace(">password", f">{PASSWORD}") for line in users_of_redis()]
    users.write_text("\n".join([*lines, ADMIN, ""]), encoding="utf-8")
    with redis_server("--aclfile", str(users), tls=tls) as address:
        yield Secured(address, tls)


def cache_at(url: str, told: Callable[[str | None], None] = lambda _: None) -> RedisCache:
    return RedisCache(
        url, secret=b"s" * 32, owner=b"me", ttl_s=60, timeout_s=20.0, clock=time.monotonic, on_trouble=told
    )


async def use(cache: RedisCache) -> None:
    """Everything that a worker does."""
    await cache.put_many({"desk:a": SCORES})
    assert list(await cache.get_many(["desk:a"])) == [SCORES]
    assert list(await cache.get_or_lease(["desk:a", "desk:b"], 20.0)) == [SCORES, Lease.OURS]
    await cache.put_many({}, released=["desk:b"])
    assert list(await cache.get_many(["desk:b"])) == [None]


async def test_the_listed_commands_are_all_that_a_worker_needs(secured: Secured) -> None:
    secured.client("admin").script_flush()
    cache = cache_at(secured.url(WORKER))
    try:
        await use(cache)
        assert await cache.probe() is None
        assert cache.counters["errors"] == 0
    finally:
        await cache.aclose()
    refused = secured.client("admin").acl_log()
    assert not [entry for entry in refused if entry["username"] == WORKER], refused


@pytest.mark.parametrize("word", allowed(WORKER))
async def test_each_command_that_is_listed_for_a_worker_is_needed(secured: Secured, word: str) -> None:
    admin = secured.client("admin")
    admin.script_flush()
    name = secured.without(WORKER, word)
    told: list[str | None] = []
    cache = cache_at(secured.url(name), told.append)
    try:
        with contextlib.suppress(
            AssertionError
        ):  # it fails open: what it does without is told by `told` and the server
            await use(cache)
    finally:
        await cache.aclose()
    missed = {entry["object"] for entry in admin.acl_log() if entry["username"] == name}
    assert word.lstrip("+") in missed
    if word in ("+evalsha", "+script|load"):
        assert not told, "it does as well without scripts"
    else:
        assert "docs/deploying.md" in str(told[0])


def test_the_listed_commands_are_all_that_an_operator_needs(secured: Secured) -> None:
    admin = secured.client("admin")
    admin.set(f"{KEY_PREFIX}desk:x", b"value", ex=60)
    admin.set("of-somebody-else", b"value")
    url = secured.url(OPERATOR)
    assert redis_upkeep.survey(url, None, 10_000).holdings["desk"].entries >= 1
    removed, complete = redis_upkeep.flush(url, None, 10_000)
    assert removed >= 1
    assert complete
    assert admin.keys("*") == [b"of-somebody-else"]


@pytest.mark.parametrize("word", allowed(OPERATOR))
def test_each_command_that_is_listed_for_an_operator_is_needed(secured: Secured, word: str) -> None:
    secured.client("admin").set(f"{KEY_PREFIX}desk:x", b"value", ex=60)
    url = secured.url(secured.without(OPERATOR, word))

    def stats_and_flush() -> None:
        redis_upkeep.survey(url, None, 10_000)
        redis_upkeep.flush(url, None, 10_000)

    with pytest.raises(ConfigError, match=r"does not permit.*docs/deploying\.md"):
        stats_and_flush()


KEY = f"{KEY_PREFIX}desk:x"


@pytest.mark.parametrize(
    ("user", "attempt"),
    [
        *((WORKER, attempt) for attempt in ("KEYS *", "SCAN 0", "FLUSHALL", "FLUSHDB", "CONFIG GET *", "ACL LIST")),
        *((WORKER, attempt) for attempt in ("GET of-somebody-else", "SET of-somebody-else x", "DEL of-somebody-else")),
        *(
            (WORKER, attempt)
            for attempt in ("MONITOR", "SUBSCRIBE x", "PUBLISH x y", "CLIENT LIST", "INFO", "EVAL 1 0")
        ),
        *((WORKER, attempt) for attempt in (f"EXPIRE {KEY} 1", f"RENAME {KEY} {KEY}", f"DUMP {KEY}", "SHUTDOWN")),
        *((OPERATOR, attempt) for attempt in (f"GET {KEY}", f"SET {KEY} x", "FLUSHALL", "KEYS *", "CONFIG GET *")),
        *((OPERATOR, attempt) for attempt in ("UNLINK of-somebody-else", "EVAL 1 0", f"DUMP {KEY}")),
    ],
)
def test_nothing_else_is_permitted(secured: Secured, user: str, attempt: str) -> None:
    with pytest.raises(NoPermissionError):
        secured.client(user).execute_command(*attempt.split())


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (lambda s, _: s.url(WORKER, "hunter2-hunter2"), "user or password in ROUTER_REDIS_URL"),
        (lambda s, _: s.url("default", "hunter2-hunter2"), "user or password in ROUTER_REDIS_URL"),
        (lambda s, other: s.url(WORKER, ca=other), "certificate is not accepted: check ssl_ca_certs"),
        (lambda s, _: s.url(WORKER).replace("127.0.0.1", "localhost"), "certificate names the address"),
        (lambda s, _: s.url(WORKER, ca=Path("/nowhere.pem")), "cannot be read: check ssl_ca_certs"),
        (
            lambda s, _: f"redis://{WORKER}:{PASSWORD}@{s.address.removeprefix('rediss://')}",
            "must begin with rediss://",
        ),
    ],
    ids=["password", "default-user", "authority", "name", "file", "plain"],
)
async def test_who_is_not_let_in_misses_and_is_told_what_to_check(
    secured: Secured, tmp_path: Path, url: Callable[[Secured, Path], str], says: str
) -> None:
    other = authority(tmp_path).authority
    told: list[str | None] = []
    cache = cache_at(url(secured, other), told.append)
    try:
        probed = await cache.probe()
        assert probed is not None
        assert says in probed
        for _ in range(5):
            assert list(await cache.get_many(["desk:a"])) == [None]
        assert told == [probed], "told once"
        assert "hunter2" not in probed
        assert PASSWORD not in probed
    finally:
        await cache.aclose()


@pytest.mark.kafka
class TestWorker:
    """The whole worker, whose broker asks nobody for a name."""

    def test_it_remembers_with_the_listed_rights_and_stats_and_flush_see_it(self, desk: Desk, secured: Secured) -> None:
        settings: dict[str, Any] = {"redis_url": secured.url(WORKER), "redis_timeout_ms": 5_000}
        with desk.worker(**settings) as worker:
            desk.wait_for_all(desk.send(30))
            assert worker.terminate() == 0
            assert "cache.trouble" not in worker.log.read_text(encoding="utf-8")
        assert findings(desk, **settings)["cache"].state == "ok"
        own = settings_of(desk, redis_url=secured.url(OPERATOR))
        assert serving.cache_stats(own, desk.folder, 10_000).holdings[desk.rules.id].entries == 30
        flushed = command(desk, "cache", "flush", "--yes", redis_url=secured.url(OPERATOR))
        assert "30" in flushed.stdout, flushed.stderr

    def test_with_a_wrong_password_it_routes_and_says_so_once_as_does_check(self, desk: Desk, secured: Secured) -> None:
        settings = {"redis_url": secured.url(WORKER, "hunter2-hunter2"), "redis_timeout_ms": 5_000}
        with desk.worker(**settings) as worker:
            found = desk.wait_for_all(desk.send(30))
            assert worker.terminate() == 0
            log = worker.log.read_text(encoding="utf-8")
        assert all(len(ends) == 1 for ends in found.values())
        lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        (told,) = [line for line in lines if line["event"] == "cache.trouble"]
        assert "user or password in ROUTER_REDIS_URL" in told["detail"]
        assert told["level"] == "warning"
        checked = command(desk, "check", **settings)
        assert "user or password in ROUTER_REDIS_URL" in " ".join(checked.stdout.split())
        assert checked.returncode == 0, "a worker without Redis works"
        assert "hunter2" not in log + checked.stdout + checked.stderr
