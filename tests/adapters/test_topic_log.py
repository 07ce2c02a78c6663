"""Topics as logs: whole topics can be read whatever their producers wrote."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from tests.servers.faulty_broker import FaultyBroker, produce_raw
from tests.servers.redis_server import free_port
from worker.adapters.kafka_records import UNREADABLE_HEADERS
from worker.adapters.topic_log import TopicReader, TopicWriter
from worker.errors import ConfigError
from worker.ports import Output


def test_a_header_name_that_is_not_utf8_does_not_end_the_reader(embedded_broker: FaultyBroker) -> None:
    """Among many others, because the interpreter calls what it calls often without looking for errors."""
    embedded_broker.create_topic("log", 1)
    writer = TopicWriter(embedded_broker.bootstrap_servers)
    for round_ in range(3):
        for n in range(100):
            writer.write(Output("log", b"k", b"%d" % n, (("fine", b"\xc3\x28"), ("none", None))), 0)
        writer.flush(30)
        produce_raw(embedded_broker, "log", b"key", b"unreadable %d" % round_, [(b"\xc3\x28", b"x"), (b"fine", b"y")])
    reader = TopicReader(embedded_broker.bootstrap_servers)
    try:
        records = list(reader.records(["log"]))
    finally:
        reader.close()
    assert len(records) == 303
    unreadable = [record for record in records if record.key == b"key"]
    assert [record.headers for record in unreadable] == [UNREADABLE_HEADERS] * 3
    assert [record.value for record in unreadable] == [b"unreadable %d" % n for n in range(3)]
    assert all(r.headers == (("fine", b"\xc3\x28"), ("none", None)) for r in records if r.key == b"k")


def test_a_record_that_the_client_refuses_is_named_and_the_others_are_written(embedded_broker: FaultyBroker) -> None:
    embedded_broker.create_topic("log", 1)
    writer = TopicWriter(embedded_broker.bootstrap_servers)
    writer.write(Output("log", None, b"before"))
    with pytest.raises(ConfigError, match="'log' takes no such record.*too large"):
        writer.write(Output("log", None, b"x" * 1_100_000))
    writer.write(Output("log", None, b"after"))
    writer.flush(30)
    reader = TopicReader(embedded_broker.bootstrap_servers)
    try:
        assert [record.value for record in reader.records(["log"])] == [b"before", b"after"]
    finally:
        reader.close()


def test_where_no_broker_answers_the_address_and_what_to_check_are_told() -> None:
    address = f"127.0.0.1:{free_port()}"
    reader = TopicReader(address)
    try:
        with pytest.raises(ConfigError) as refused:
            reader.begins(["log"])
    finally:
        reader.close()
    said = str(refused.value)
    assert f"topic 'log' on {address} cannot be read: " in said
    assert "Check the bootstrap servers, that the brokers run, and security.protocol" in said
    assert said.endswith("hangs up on a client that brings neither")


def test_a_topic_that_is_not_there_is_told_with_the_command_that_makes_it(embedded_broker: FaultyBroker) -> None:
    metadata = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
    reader = TopicReader(embedded_broker.bootstrap_servers)
    try:
        assert reader._unreadable("log", metadata).endswith("`ticket-router topics --create` makes it")
    finally:
        reader.close()
