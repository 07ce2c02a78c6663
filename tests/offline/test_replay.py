"""What a replay sends in again, and what it leaves."""

from __future__ import annotations

import io
from collections.abc import Sequence

import orjson
from rich.console import Console

from tests.core.sets import rule_set
from worker.adapters.topic_log import Record
from worker.console.operating import print_replay
from worker.core.envelope import (
    ATTEMPT,
    DECISION_HEADER,
    POINTER,
    Headers,
    Origin,
    attempt_of,
    dead_letter_headers,
    origin_headers,
    stated_origin,
)
from worker.offline.replay import Replay, Selection, plan
from worker.ports import Partition

RULES = rule_set("billing", "login")
ORIGIN = Origin(RULES.input_topic, 3, 17)
EVERYTHING = Selection()
OWN: Headers = (("a", b"\xc3\x28"), ("a", None), ("traceparent", b"t"))


def dead_letter(code: str = "invalid_json", attempts: int = 0, at_ms: int = 0, origin: Origin = ORIGIN) -> Record:
    received = (*OWN, (ATTEMPT, b"%d" % attempts))
    headers = dead_letter_headers(received, origin, code, "why")
    return Record(Partition(RULES.dead_letter_topic, 0), 0, b"key", b"value", headers, at_ms)


def escalated(*codes: str, attempts: int = 0) -> Record:
    place = {"topic": ORIGIN.topic, "partition": ORIGIN.partition, "offset": ORIGIN.offset}
    decision = orjson.dumps({"origin": place, "reasons": [{"code": code} for code in codes]})
    headers: Headers = (*OWN, (DECISION_HEADER, decision), (ATTEMPT, b"%d" % attempts))
    return Record(Partition(RULES.human_topic, 0), 0, b"key", b"value", headers, 0)


def planned(
    records: Sequence[Record], sent_in: Sequence[Record] = (), selection: Selection = EVERYTHING, dead: bool = True
) -> Replay:
    return plan(records, sent_in, RULES.input_topic, 4, dead, selection)


def test_a_dead_letter_goes_back_as_it_came_with_its_origin_and_attempts() -> None:
    [resend] = planned([dead_letter(attempts=1)]).resends
    assert resend.partition == ORIGIN.partition
    output = resend.output
    assert (output.topic, output.key, output.value) == (RULES.input_topic, b"key", b"value")
    assert output.headers == (*OWN, *origin_headers(ORIGIN), (ATTEMPT, b"2"))


def test_an_escalated_ticket_goes_back_without_its_decision_and_counts_up() -> None:
    [resend] = planned([escalated("engine_timeout", attempts=1)], dead=False).resends
    assert DECISION_HEADER not in dict(resend.output.headers)
    assert stated_origin(resend.output.headers) == ORIGIN
    assert attempt_of(resend.output.headers) == 2


def test_what_was_sent_in_already_is_not_sent_twice() -> None:
    first = planned([dead_letter(), dead_letter()])
    assert len(first.resends) == 1
    sent = Record(Partition(RULES.input_topic, 3), 40, b"key", b"value", first.resends[0].output.headers, 0)
    again = planned([dead_letter(), dead_letter(attempts=1)], [sent])
    assert [resend.attempt for resend in again.resends] == [2]
    assert again.left == {"sent in again already": 1}


def test_a_ticket_is_sent_in_so_often_and_not_again() -> None:
    bound = Selection(max_attempts=2)
    assert len(planned([dead_letter(attempts=1)], selection=bound).resends) == 1
    assert planned([dead_letter(attempts=2)], selection=bound).left == {"sent in 2 times already": 1}
    assert not planned([escalated("engine_timeout", attempts=2)], selection=bound, dead=False).resends


def test_reasons_and_times_choose() -> None:
    records = [dead_letter("no_text", at_ms=5), dead_letter("invalid_json", at_ms=9, origin=Origin(ORIGIN.topic, 0, 1))]
    assert planned(records, selection=Selection(reason="no_text")).reasons == {"no_text": 1}
    assert planned(records, selection=Selection(until_ms=5)).reasons == {"no_text": 1}
    both = planned([escalated("below_threshold", "engine_down")], selection=Selection(reason="engine_down"), dead=False)
    assert len(both.resends) == 1


def test_pointers_and_strangers_are_left() -> None:
    pointer = dead_letter()
    pointer = Record(pointer.partition, 0, None, None, (*pointer.headers, (POINTER, b"value")), 0)
    found = planned(
        [pointer, dead_letter(origin=Origin("elsewhere", 0, 0)), Record(pointer.partition, 0, b"", b"", (), 0)]
    )
    assert not found.resends
    assert sum(found.left.values()) == 3


def test_places_that_cannot_be_are_left_whoever_states_them() -> None:
    """Anybody may write to a topic; nothing of it may keep back the rest."""

    def stated(**place: object) -> Record:
        origin = {"topic": RULES.input_topic, "partition": 0, "offset": 1} | place
        decision = orjson.dumps({"origin": origin, "reasons": []})
        return Record(Partition(RULES.human_topic, 0), 0, b"", b"", ((DECISION_HEADER, decision),), 0)

    places = [{"partition": 4}, {"partition": -1}, {"partition": 2**40}, {"offset": -7}, {"offset": 1.5}, {"topic": 5}]
    odd = [b"5", b"[]", b"{}", b'{"origin": [], "reasons": []}', b'{"reasons": [1]}', b'{"reasons": 1}', b"[" * 9_999]
    strangers = [stated(**place) for place in places]
    strangers += [Record(Partition(RULES.human_topic, 0), 0, b"", b"", ((DECISION_HEADER, raw),), 0) for raw in odd]
    found = planned([*strangers, dead_letter(origin=Origin(RULES.input_topic, 2**40, 0)), escalated("x")], dead=False)
    assert [resend.origin for resend in found.resends] == [ORIGIN]
    assert sum(found.left.values()) == len(strangers) + 1
    assert found.left[f"from a partition that topic {RULES.input_topic} does not have"] == 1


def test_what_cannot_be_written_is_not_said_to_be_sent() -> None:
    both = planned([dead_letter(), dead_letter("no_text", origin=Origin(RULES.input_topic, 0, 1))])
    found = both.without({both.resends[0]: "too large"})
    assert (found.reasons, found.left) == ({"no_text": 1}, {"too large": 1})


def _told(replay: Replay) -> str:
    out = io.StringIO()
    print_replay(Console(file=out, width=200), replay, dry_run=False)
    return out.getvalue()


def test_bytes_that_could_not_be_read_are_said_to_be_the_same_when_sent_again() -> None:
    other = dead_letter("undeliverable", origin=Origin(RULES.input_topic, 1, 8))
    told = _told(planned([dead_letter("invalid_json"), other]))
    assert "sent 2 tickets" in told
    assert "1 of them could not be read, and nothing changed in their bytes" in told and "`intake`" in told
    assert "nothing changed" not in _told(planned([dead_letter("undeliverable")]))
