"""Rows of a file become messages that the rule set's own intake reads, and never carry their label along."""

from __future__ import annotations

import orjson
import pytest

from tests.core.sets import category_set
from worker.core.rules import Rules, RuleSet
from worker.core.ticket import parse_ticket
from worker.errors import ConfigError
from worker.offline.sending import as_message, as_ticket

ROW = {"id": "h1", "text": "the printer jams", "label": "bug", "language": "en", "kind": "clear"}
ZENDESK = {"id": "/detail/id", "text": "/detail/description", "channel": "/detail/via/channel"}


def rule_set(**intake: str) -> RuleSet:
    rules = Rules.model_validate({"version": 1, "alpha": 0.1, "delta": 0.1, "intake": intake})
    return RuleSet(categories=category_set("billing", "login", "bug"), rules=rules)


@pytest.mark.parametrize("intake", [{}, ZENDESK, {"id": "/a~1b"}])
def test_the_worker_reads_what_is_sent(intake: dict[str, str]) -> None:
    rules = rule_set(**intake)
    message = as_message(ROW, 1, rules, "in")
    assert message is not None
    ticket = parse_ticket(message.value, rules.rules.intake, 10_000)
    assert (ticket.id, ticket.text, ticket.language) == ("h1", "the printer jams", "en")
    assert (message.topic, message.key) == ("in", b"h1")
    assert b"bug" not in (message.value or b"")


def test_a_row_without_an_id_has_its_place_and_one_without_text_is_left_out() -> None:
    message = as_message({"text": "x"}, 7, rule_set(), "in")
    assert message is not None
    assert orjson.loads(message.value or b"") == {"id": "row-7", "text": "x"}
    assert as_message({"id": "a", "text": " "}, 8, rule_set(), "in") is None


@pytest.mark.parametrize("intake", [{"text": ""}, {"id": "/text/id"}])
def test_a_shape_without_a_place_is_refused(intake: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="leaves no place"):
        as_message(ROW, 1, rule_set(**intake), "in")


@pytest.mark.parametrize("intake", [{}, {**ZENDESK, "metadata": "/detail"}, {"text": "/description", "metadata": ""}])
def test_metadata_stands_where_the_worker_looks_for_it(intake: dict[str, str]) -> None:
    rules = rule_set(**intake)
    sent = as_ticket({"text": "the printer jams", "id": ""}, {"vip": True}, rules)
    ticket = parse_ticket(sent, rules.rules.intake, 10_000)
    assert (ticket.id, ticket.text, ticket.metadata["vip"]) == (None, "the printer jams", True)
    with pytest.raises(ConfigError, match="leaves no place"):
        as_ticket({"text": "x"}, {"description": "y", "text": "y"}, rule_set(metadata=""))
