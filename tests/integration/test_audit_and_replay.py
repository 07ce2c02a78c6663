"""The commands `audit` and `replay` on a real Kafka that a real worker works on."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime, timedelta

import orjson
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from tests.integration.desk import COMMAND, Desk, StubProcess
from tests.waiting import wait_for
from worker.adapters.topic_log import Record, TopicReader, TopicWriter
from worker.core.envelope import ATTEMPT, DECISION_HEADER, ORIGIN_OFFSET, Origin, dead_letter_headers
from worker.ports import Output, Partition

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(400)]


def command(desk: Desk, *arguments: str) -> tuple[int, str]:
    """Exit code and what it said."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("ROUTER_", "OTEL_"))}
    done = subprocess.run(
        [str(COMMAND), arguments[0], "--rules", str(desk.folder), *arguments[1:]],
        env={**own, **desk.environment, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        cwd=desk.folder,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def decision_of(record: Record) -> dict[str, object]:
    found: dict[str, object] = orjson.loads(dict(record.headers)[DECISION_HEADER] or b"")
    return found


def test_the_audit_is_clean_after_a_kill_and_names_a_copy_that_somebody_adds(desk: Desk) -> None:
    ids = desk.send(300)
    desk.send_raw(b"no ticket")
    with desk.worker(max_in_flight=50) as worker:
        wait_for(lambda: worker.status().get("settled", 0) >= 60, "progress")
        worker.kill()
    with desk.worker() as worker:
        desk.wait_for_all(ids)
        wait_for(lambda: worker.status()["lag"] == 0 and worker.status()["in_flight"] == 0, "the end")
    code, said = command(desk, "audit", "--since", "0001-01-01")
    assert code == 0, said
    assert "301 tickets: 300 routed, 0 escalated, 1 dead-lettered, 0 waiting" in said
    assert said.strip().endswith("missing 0, duplicates 0, order violations 0")

    copied = desk.records(f"{desk.rules.id}.login")[0]
    writer = TopicWriter(desk.bootstrap_servers)
    writer.write(Output(desk.rules.human_topic, copied.key, copied.value, copied.headers))
    writer.flush(30)
    code, said = command(desk, "audit")
    assert (code, said.strip().splitlines()[-1]) == (1, "missing 0, duplicates 1, order violations 0")

    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    code, said = command(desk, "audit", "--since", later)
    assert (code, said.splitlines()[0].split(":")[0]) == (0, "0 tickets")


def test_the_audit_counts_what_waits_and_names_what_is_missing(desk: Desk) -> None:
    desk.send(5)
    code, said = command(desk, "audit")
    assert code == 0, said
    assert "5 waiting" in said


def test_the_audit_counts_what_the_brokers_deleted_before_a_worker_came_to_it(desk: Desk) -> None:
    """Retention, or whoever deletes records, while no worker runs."""
    ids = desk.send(60)
    with desk.worker() as worker:
        desk.wait_for_all(ids)
        assert worker.terminate() == 0
    desk.send(60, first=60)
    places = [TopicPartition(desk.rules.input_topic, number) for number in range(3)]
    reader = TopicReader(desk.bootstrap_servers, group_id=f"ticket-router.{desk.rules.id}")
    ends, done = reader.ends([desk.rules.input_topic]), reader.committed(desk.rules.input_topic)
    admin = AdminClient({"bootstrap.servers": desk.bootstrap_servers})
    up_to = {each.partition: ends[Partition(each.topic, each.partition)] - 3 for each in places}
    for future in admin.delete_records(
        [TopicPartition(each.topic, each.partition, up_to[each.partition]) for each in places]
    ).values():
        future.result(30)
    assert reader.begins([desk.rules.input_topic]) == {
        Partition(p.topic, p.partition): up_to[p.partition] for p in places
    }
    reader.close()
    gone = sum(up_to[partition.number] - offset for partition, offset in done.items())
    assert gone > 0
    code, said = command(desk, "audit")
    assert (code, said.strip().splitlines()[-1]) == (
        1,
        f"missing 0, duplicates 0, order violations 0, expired {gone}",
    ), said
    with desk.worker() as worker:
        wait_for(lambda: worker.status()["settled"] == 9 and worker.status()["in_flight"] == 0, "the rest")
        assert worker.terminate() == 0
    code, said = command(desk, "audit")
    assert (code, f"expired {gone}" in said) == (1, True), said


def test_dead_letters_are_sent_in_again_and_keep_their_origin(desk: Desk) -> None:
    desk.send(3)
    desk.send_raw(b"no ticket")
    dead = desk.rules.dead_letter_topic
    with desk.worker() as worker:
        wait_for(lambda: len(desk.records(dead)) == 1, "the dead letter")
        code, said = command(desk, "replay", "--from", "dead-letter", "--dry-run")
        assert (code, "would send 1 tickets" in said) == (0, True), said
        assert "0 tickets" in command(desk, "replay", "--from", "dead-letter", "--reason", "no_text")[1]
        assert "sent 1 tickets" in command(desk, "replay", "--from", "dead-letter")[1]
        wait_for(lambda: len(desk.records(dead)) == 2, "its return")
        again = command(desk, "replay", "--from", "dead-letter", "--max-attempts", "1")[1]
        assert "sent 0 tickets" in again, again
        wait_for(lambda: worker.status()["in_flight"] == 0, "the end")
    first, second = (dict(record.headers) for record in desk.records(dead))
    assert first[ORIGIN_OFFSET] == second[ORIGIN_OFFSET]
    assert {first[ATTEMPT], second[ATTEMPT]} == {b"1", b"2"}  # which is read first depends on their partitions
    code, said = command(desk, "audit")
    assert code == 0, said


def test_what_cannot_be_sent_in_again_is_left_with_its_reason_and_keeps_nothing_back(desk: Desk) -> None:
    """A stranger's message, and one that this client may not write: as with a lower limit than the worker's."""
    desk.send_raw(b"no ticket")
    desk.send_raw(b"x" * 600_000)
    dead = desk.rules.dead_letter_topic
    place = Origin(desk.rules.input_topic, 2**40, 5)
    writer = TopicWriter(desk.bootstrap_servers)
    writer.write(Output(dead, None, b"a stranger's", dead_letter_headers((), place, "no_text", "")))
    writer.flush(30)
    with desk.worker():
        wait_for(lambda: len(desk.records(dead)) == 3, "the dead letters")
    desk.environment["ROUTER_MAX_OUTPUT_BYTES"] = "500000"
    code, said = command(desk, "replay", "--from", "dead-letter")
    assert code == 0, said
    assert "sent 1 tickets in again" in said
    assert f"1 left: from a partition that topic {desk.rules.input_topic} does not have" in said
    assert "takes no such record" in said
    assert "Traceback" not in said
    assert len(desk.records(desk.rules.input_topic)) == 3
    del desk.environment["ROUTER_MAX_OUTPUT_BYTES"]
    assert "sent 1 tickets in again" in command(desk, "replay", "--from", "dead-letter")[1]


def test_escalated_tickets_are_sent_in_again_and_keep_their_decision_id(desk: Desk, engine: StubProcess) -> None:
    engine.tell(refused="ticket 1:")
    human, routed = desk.rules.human_topic, f"{desk.rules.id}.login"
    with desk.worker():
        desk.wait_for_all(desk.send(2))
        [escalated] = desk.records(human)
        engine.tell(refused=None)
        code, said = command(desk, "replay", "--from", "human", "--reason", "engine_refused")
        assert (code, "sent 1 tickets" in said) == (0, True), said
        wait_for(lambda: len(desk.records(routed)) == 1, "the ticket on its topic")
        assert "sent 0 tickets" in command(desk, "replay", "--from", "human", "--reason", "engine_refused")[1]
    [record] = desk.records(routed)
    assert decision_of(record)["decision_id"] == decision_of(escalated)["decision_id"]
    assert decision_of(record)["origin"] == decision_of(escalated)["origin"]
    assert (record.key, record.value) == (escalated.key, escalated.value)
    assert dict(record.headers)[ATTEMPT] == b"1"
    code, said = command(desk, "audit")
    assert code == 0, said


def test_the_topic_of_answers_is_listed_and_made_with_the_others(desk: Desk) -> None:
    name = f"{desk.rules.id}.answers"
    rules = desk.folder / "rules.yaml"
    text = rules.read_text(encoding="utf-8")
    assert "topics" not in text
    rules.write_text(f"{text.rstrip()}\ntopics:\n  answers: {name}\n", encoding="utf-8")
    code, shown = command(desk, "topics")
    assert code == 0 and name in shown and "missing" in shown
    code, shown = command(desk, "topics", "--create")
    assert code == 0 and name in shown and "missing" not in shown
