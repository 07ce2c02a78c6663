"""Apache Kafka with TLS, logins and rights: what the worker needs is what docs/deploying.md lists, and no more."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from tests.adapters.test_kafka_client import LISTENER
from tests.integration.desk import Desk, StubProcess
from tests.integration.secured import findings, rights_of, settings_of
from tests.servers.kafka import ApacheKafka
from tests.servers.tls import Authority, authority
from tests.waiting import wait_for
from worker import serving
from worker.adapters.kafka import KafkaStream
from worker.adapters.kafka_client import KafkaConfig
from worker.adapters.kafka_topics import create_topics, describe_topics
from worker.adapters.topic_log import READER_GROUP, TopicReader, TopicWriter
from worker.errors import ConfigError, StreamRetriable
from worker.offline.replay import Selection
from worker.ports import Output

pytestmark = pytest.mark.kafka

QUIET = logging.getLogger("tests.secured-kafka")
QUIET.addHandler(logging.NullHandler())
QUIET.propagate = False

NAMES = ("admin", "worker", "operator", *(f"without-{number}" for number in range(len(rights_of("worker")))))
PASSWORD = "s3cret-of-{}"
AUTHORIZER = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    # The controller's listener, on which nobody but the node itself calls, asks for no name.
    "super.users": "User:admin;User:ANONYMOUS",
    "allow.everyone.if.no.acl.found": "false",
}
RESOURCES = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional id": ResourceType.TRANSACTIONAL_ID,
}


@dataclass(frozen=True, slots=True)
class Secured:
    server: ApacheKafka
    tls: Authority

    def properties(self, user: str, password: str | None = None) -> dict[str, str | int | float | bool]:
        return {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": user,
            "sasl.password": password or PASSWORD.format(user),
            "ssl.ca.location": str(self.tls.authority),
        }

    def config(self, user: str, topic: str = "tickets", group: str = "group") -> KafkaConfig:
        return KafkaConfig(
            self.server.bootstrap_servers,
            topic,
            group,
            delivery="exactly_once",
            session_timeout_ms=6_000,
            connect_timeout_s=2.0,
            properties=self.properties(user),
        )

    def admin(self, user: str) -> AdminClient:
        """To be kept until its answers have come."""
        return AdminClient({"bootstrap.servers": self.server.bootstrap_servers, **self.properties(user)})

    def grant(self, user: str, resource: str, name: str, pattern: str, operation: str) -> None:
        binding = AclBinding(
            RESOURCES[resource],
            name,
            ResourcePatternType[pattern.upper()],
            f"User:{user}",
            "*",
            AclOperation[operation.upper()],
            AclPermissionType.ALLOW,
        )
        admin = self.admin("admin")
        for future in admin.create_acls([binding], request_timeout=20).values():
            future.result(20)

    def grant_listed(self, user: str, who: str, desk: Desk, *, but: int | None = None) -> None:
        """The rights that docs/deploying.md lists for `who`, without the one at `but`."""
        group = f"ticket-router.{desk.rules.id}"
        for number, (resource, name, pattern, operation) in enumerate(rights_of(who)):
            names = {
                "the input topic": [desk.rules.input_topic],
                "each output topic": [*desk.rules.output_topics],
                "`ticket-router.reader`": [READER_GROUP],
            }.get(name, [group])
            for each in names if number != but else ():
                self.grant(user, resource, each, pattern, operation)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured-kafka")
    tls = authority(folder)
    users = {name: PASSWORD.format(name) for name in NAMES}
    with ApacheKafka(folder, AUTHORIZER, users, tls=tls) as server:
        yield Secured(server, tls)


@pytest.fixture(scope="module")
def shared_desk(tmp_path_factory: pytest.TempPathFactory, secured: Secured, engine: StubProcess) -> Desk:
    """With the listed rights for `worker` and `operator`, and all but one of a worker's for each `without-N`."""
    folder = tmp_path_factory.mktemp("secured")
    desk = Desk(folder, secured.server.bootstrap_servers, engine.url, properties=secured.properties("admin"))
    secured.grant_listed("worker", "worker", desk)
    secured.grant_listed("operator", "operator", desk)
    for number in range(len(rights_of("worker"))):
        secured.grant_listed(f"without-{number}", "worker", desk, but=number)
    return desk


def test_a_worker_with_the_listed_rights_and_no_others_routes_each_ticket_once(
    shared_desk: Desk, secured: Secured
) -> None:
    desk = shared_desk
    with desk.worker(kafka_properties=json.dumps(secured.properties("worker"))) as worker:
        ids = desk.send(120)
        desk.send_raw(b"no ticket")
        found = desk.wait_for_all(ids)
        assert worker.terminate() == 0
    assert all(len(ends) == 1 for ends in found.values())
    assert {ends[0] for ends in found.values()} <= set(desk.rules.output_topics)
    assert len(desk.records(desk.rules.dead_letter_topic)) == 1
    assert len(desk.records(desk.rules.decisions_topic)) >= len(ids)


def test_check_is_content_with_the_listed_rights(shared_desk: Desk, secured: Secured) -> None:
    found = findings(shared_desk, kafka_properties=secured.properties("worker"))
    assert {each.state for each in found.values()} == {"ok"}, found


def test_an_operator_with_the_listed_rights_sends_reads_and_audits(
    shared_desk: Desk, secured: Secured, tmp_path: Path
) -> None:
    desk = shared_desk
    own, folder = settings_of(desk, kafka_properties=secured.properties("operator")), desk.folder
    tickets = tmp_path / "tickets.jsonl"
    tickets.write_text('{"id": "sent", "text": "trouble with login"}\n', encoding="utf-8")
    assert serving.send(own, folder, tickets, None) == (desk.rules.input_topic, 1)
    assert serving.audit(own, folder, None).clean
    assert serving.export(own, folder, tmp_path / "decisions.jsonl") >= 120
    serving.replay(own, folder, "dead-letter", None, Selection(None, None, 5), dry_run=False)
    assert None not in serving.rule_set_topics(own, folder, True, 2, 1).values()
    admin, gone = secured.admin("admin"), desk.rules.dead_letter_topic
    admin.delete_topics([gone], request_timeout=20)[gone].result(20)
    wait_for(lambda: serving.rule_set_topics(own, folder, False, 2, 1)[gone] is None, "the topic to be gone")
    wait_for(lambda: serving.rule_set_topics(own, folder, True, 2, 1)[gone] is not None, "the topic to be made anew")


@pytest.mark.parametrize(
    "lacking", range(len(rights_of("worker"))), ids=[f"{r[0]} {r[3]}".replace(" ", "-") for r in rights_of("worker")]
)
def test_each_listed_right_is_needed_and_its_lack_is_told(shared_desk: Desk, secured: Secured, lacking: int) -> None:
    rules, user = shared_desk.rules, f"without-{lacking}"
    config = secured.config(user, rules.input_topic, f"ticket-router.{rules.id}")
    resource, name, *_ = rights_of("worker")[lacking]
    if name == "each output topic":
        with pytest.raises(ConfigError, match=r"authorization failed.*docs/deploying\.md"):
            describe_topics(config, [*rules.output_topics], 2.0)
        return
    stream = KafkaStream(config, QUIET)
    try:
        if resource != "group":
            with pytest.raises(ConfigError, match=r"(?i)authorization failed.*permit this client"):
                stream.open(LISTENER)
            return
        stream.open(LISTENER)
        until = time.monotonic() + 60
        while stream.trouble() is None:
            stream.poll(1, 0.1)
            assert time.monotonic() < until
        assert "Group authorization failed" in (stream.trouble() or "")
    finally:
        stream.close()


def test_at_least_once_needs_no_transactional_id(shared_desk: Desk, secured: Secured) -> None:
    lacking = next(n for n, right in enumerate(rights_of("worker")) if right[0] == "transactional id")
    rules, user = shared_desk.rules, f"without-{lacking}"
    right = secured.config(user, rules.input_topic, f"ticket-router.{rules.id}")
    stream = KafkaStream(replace(right, delivery="at_least_once"), QUIET)
    stream.open(LISTENER)
    stream.close()
    writer = TopicWriter(shared_desk.bootstrap_servers, secured.properties(user))  # idempotent, as the worker's
    writer.write(Output(rules.human_topic, None, b"{}"))
    writer.flush(20)


def _writes_a_ticket(desk: Desk, secured: Secured) -> None:
    writer = TopicWriter(desk.bootstrap_servers, secured.properties("worker"))
    writer.write(Output(desk.rules.input_topic, None, b"{}"))
    writer.flush(20)


def _reads_tickets_of_others(desk: Desk, secured: Secured) -> None:
    reader = TopicReader(desk.bootstrap_servers, secured.properties("worker"))
    try:
        list(reader.records([desk.rules.human_topic]))
    finally:
        reader.close()


def _makes_a_topic(desk: Desk, secured: Secured) -> None:
    create_topics(secured.config("worker"), {"made-by-a-worker": 1}, 1)


def _deletes_a_topic(desk: Desk, secured: Secured) -> None:
    admin = secured.admin("worker")
    for future in admin.delete_topics([desk.rules.decisions_topic], request_timeout=20).values():
        future.result(20)


def _gives_itself_a_right(desk: Desk, secured: Secured) -> None:
    binding = AclBinding(
        ResourceType.TOPIC,
        desk.rules.input_topic,
        ResourcePatternType.LITERAL,
        "User:worker",
        "*",
        AclOperation.WRITE,
        AclPermissionType.ALLOW,
    )
    admin = secured.admin("worker")
    for future in admin.create_acls([binding], request_timeout=20).values():
        future.result(20)


def _looks_at_another_group(desk: Desk, secured: Secured) -> None:
    admin = secured.admin("worker")
    for future in admin.describe_consumer_groups(["another-group"], request_timeout=20).values():
        future.result(20)


def _takes_another_transactional_id(desk: Desk, secured: Secured) -> None:
    own = {"bootstrap.servers": desk.bootstrap_servers, **secured.properties("worker")}
    Producer({**own, "transactional.id": "another"}).init_transactions(20)


@pytest.mark.parametrize(
    "attempt",
    [
        _writes_a_ticket,
        _reads_tickets_of_others,
        _makes_a_topic,
        _deletes_a_topic,
        _gives_itself_a_right,
        _looks_at_another_group,
        _takes_another_transactional_id,
    ],
)
def test_a_worker_with_the_listed_rights_can_do_nothing_else(
    shared_desk: Desk, secured: Secured, attempt: Callable[[Desk, Secured], None]
) -> None:
    with pytest.raises((ConfigError, StreamRetriable, KafkaException), match=r"(?i)authorization.failed"):
        attempt(shared_desk, secured)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"sasl.password": "hunter2-hunter2"}, r"invalid credentials.*sasl\.password"),
        ({"sasl.username": "nobody"}, r"invalid credentials.*sasl\.username"),
        ({"sasl.mechanism": "PLAIN"}, r"SCRAM-SHA-512.*sasl\.mechanism"),
        ({"ssl.ca.location": "another"}, r"certificate verify failed.*ssl\.ca\.location"),
        ({"security.protocol": "SASL_PLAINTEXT"}, r"security\.protocol.*SASL_PLAINTEXT.*TLS"),
        ({"security.protocol": "PLAINTEXT"}, r"security\.protocol.*PLAINTEXT.*TLS"),
        ({"security.protocol": "SSL"}, r"security\.protocol.*SSL.*login"),
    ],
    ids=["password", "user", "mechanism", "authority", "no-tls", "plain", "no-login"],
)
def test_who_is_not_let_in_is_told_what_to_check(
    secured: Secured, tmp_path: Path, wrong: dict[str, str], says: str
) -> None:
    if "ssl.ca.location" in wrong:
        wrong = {"ssl.ca.location": str(authority(tmp_path).authority)}
    right = secured.config("worker")
    config = replace(right, properties={**right.properties, **wrong}, connect_timeout_s=1.5)
    stream = KafkaStream(config, QUIET)
    try:
        with pytest.raises(ConfigError, match=says) as told:
            stream.open(LISTENER)
    finally:
        stream.close()
    if "sasl.password" in wrong:
        with pytest.raises(ConfigError, match=says):  # as `check` asks
            describe_topics(config, ["tickets"], 1.0)
    assert "hunter2" not in str(told.value)
    assert "s3cret" not in str(told.value)


def test_a_broker_whose_certificate_names_another_address_is_refused(secured: Secured) -> None:
    """Whoever has some certificate of that authority is no broker yet."""
    right, port = secured.config("worker"), secured.server.bootstrap_servers.rpartition(":")[2]
    properties = {**right.properties, "broker.address.family": "v4"}
    config = replace(right, bootstrap_servers=f"localhost:{port}", properties=properties, connect_timeout_s=1.5)
    stream = KafkaStream(config, QUIET)
    with pytest.raises(ConfigError, match=r"(?i)certificate.*ssl\.ca\.location.*names the address"):
        stream.open(LISTENER)
    stream.close()
