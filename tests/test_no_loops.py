"""Settings and rules that would make a worker feed itself are refused before anything is connected."""

from __future__ import annotations

import pytest

from tests.core.sets import rule_set
from worker.errors import ConfigError
from worker.settings import Settings
from worker.wiring import kafka_config

RULES = rule_set()


def settings(input_topic: str | None = None) -> Settings:
    return Settings(kafka_bootstrap_servers="127.0.0.1:1", kafka_input_topic=input_topic)


@pytest.mark.parametrize("topic", RULES.output_topics)
def test_an_input_that_is_one_of_the_outputs_is_refused(topic: str) -> None:
    with pytest.raises(ConfigError, match="round for ever"):
        kafka_config(settings(topic), RULES)


@pytest.mark.parametrize("topic", ["^desk.*", "^tickets", "desk.*", "a,b", "tickets\n", "t" * 250])
def test_a_pattern_or_what_else_is_no_name_is_refused_as_input(topic: str) -> None:
    with pytest.raises(ConfigError, match="ROUTER_KAFKA_INPUT_TOPIC"):
        kafka_config(settings(topic), RULES)


def test_a_topic_of_ones_own_is_taken() -> None:
    assert kafka_config(settings("other.tickets_2"), RULES).input_topic == "other.tickets_2"
    assert kafka_config(settings(), RULES).input_topic == RULES.input_topic
