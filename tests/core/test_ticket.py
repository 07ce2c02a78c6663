"""Which bytes are a ticket."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonpointer import EndOfList, JsonPointer

from worker.core.envelope import DEAD_LETTER_REASONS
from worker.core.ticket import MOST_LEVELS, Intake, decode_object, parse_ticket, value_at
from worker.errors import InvalidTicket

MAX = 500_000
DEFAULT = Intake()


def parse(value: bytes | None, intake: Intake = DEFAULT) -> object:
    return parse_ticket(value, intake, MAX)


NO_TICKETS: list[tuple[str, bytes | None, str]] = [
    ("tombstone", None, "null_value"),
    ("empty", b"", "invalid_json"),
    ("not utf-8", b'{"text": "\xff\xfe"}', "invalid_utf8"),
    ("utf-16", '{"text": "hi"}'.encode("utf-16"), "invalid_utf8"),
    ("byte order mark", b'\xef\xbb\xbf{"text": "hi"}', "invalid_json"),
    ("truncated", b'{"text": "hi', "invalid_json"),
    ("two documents", b'{"text": "hi"}{"text": "hi"}', "invalid_json"),
    ("NaN", b'{"text": "hi", "metadata": {"a": NaN}}', "invalid_json"),
    ("infinite", b'{"text": "hi", "metadata": {"a": 1e999}}', "invalid_json"),
    ("5,000 digits", b'{"text": "hi", "metadata": {"a": ' + b"9" * 5000 + b"}}", "invalid_json"),
    ("lone surrogate", b'{"text": "\\ud800"}', "lone_surrogate"),
    ("100,000 deep", b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "too_deep"),
    ("1,000 deep", b'{"text": "hi", "metadata": ' + b'{"a":' * 1000 + b"1" + b"}" * 1000 + b"}", "too_deep"),
    ("501 objects", b'{"text": "hi", "metadata": ' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}", "too_deep"),
    ("501 lists", b'{"text": "hi", "metadata": {"a":' + b"[" * 499 + b"]" * 499 + b"}}", "too_deep"),
    ("duplicate key", b'{"text": "one", "text": "two"}', "duplicate_key"),
    ("duplicate key inside", b'{"text": "one", "metadata": {"a": 1, "a": 2}}', "duplicate_key"),
    ("null", b"null", "not_an_object"),
    ("list", b"[]", "not_an_object"),
    ("string", b'"hi"', "not_an_object"),
    ("no text", b'{"id": "1"}', "no_text"),
    ("blank text", b'{"id": "1", "text": " \\n\\t "}', "no_text"),
    ("invisible text", '{"text": "\u200b\u3164\u2060"}'.encode(), "no_text"),
    ("text is a number", b'{"text": 5}', "wrong_type"),
    ("body is a list", b'{"subject": "s", "body": []}', "wrong_type"),
    ("id is an object", b'{"id": {}, "text": "hi"}', "wrong_type"),
    ("id is a boolean", b'{"id": true, "text": "hi"}', "wrong_type"),
    ("id of 300 characters", b'{"id": "' + b"x" * 300 + b'", "text": "hi"}', "wrong_type"),
    ("metadata is a list", b'{"text": "hi", "metadata": []}', "wrong_type"),
    ("too large", b'{"text": "' + b"x" * MAX + b'"}', "too_large"),
]


@pytest.mark.parametrize(("value", "code"), [case[1:] for case in NO_TICKETS], ids=[case[0] for case in NO_TICKETS])
def test_bytes_that_are_no_ticket_are_named_for_what_is_wrong(value: bytes | None, code: str) -> None:
    with pytest.raises(InvalidTicket) as caught:
        parse(value)
    assert caught.value.code == code
    assert code in DEAD_LETTER_REASONS


def test_the_error_never_repeats_the_ticket() -> None:
    for _, value, _ in NO_TICKETS:
        with pytest.raises(InvalidTicket) as caught:
            parse(value)
        assert len(str(caught.value)) < 200


def test_200_thousand_keys_are_only_metadata() -> None:
    body = {"text": "hi", "metadata": {f"{n:x}": 0 for n in range(50_000)}}
    assert parse(json.dumps(body, separators=(",", ":")).encode()).text == "hi"  # type: ignore[attr-defined]


def test_a_full_ticket_is_read_whole() -> None:
    body = {
        "id": 4711,
        "subject": "Printer",
        "body": "does\nnot  print",
        "tenant": "acme",
        "channel": "mail",
        "language": "en",
        "created_at": "2026-01-01T00:00:00Z",
        "metadata": {"vip": True},
    }
    ticket = parse_ticket(json.dumps(body).encode(), DEFAULT, MAX)
    assert (ticket.id, ticket.text, ticket.tenant) == ("4711", "Printer does not print", "acme")
    assert (ticket.channel, ticket.language, ticket.metadata) == ("mail", "en", {"vip": True})


def test_text_wins_over_subject_and_body() -> None:
    assert parse(b'{"text": "t", "subject": "s", "body": "b"}').text == "t"  # type: ignore[attr-defined]


def test_pointers_reach_into_a_helpdesk_payload_and_html_becomes_text() -> None:
    intake = Intake(id="/ticket/id", subject="/ticket/title", body="/article/0/body", markup="html")
    body = {
        "ticket": {"id": 9, "title": "Hi"},
        "article": [{"body": "<p>My <b>screen</b> is&nbsp;black<br>since<script>x()</script> today</p>"}],
    }
    ticket = parse_ticket(json.dumps(body).encode(), intake, MAX)
    assert ticket.text == "Hi My screen is black since today"
    assert ticket.id == "9"


def test_a_bad_pointer_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON Pointer"):
        Intake(id="no-slash")


_SPACES = st.sampled_from(["", " ", "  ", "\n", "\t", "\r\n"])
_TEXTS = st.sampled_from(['"a"', '"b"', '"\\":"', '":"', '"a\\" :"', '""'])


@st.composite
def _json_texts(draw: st.DrawFn, depth: int = 3) -> str:
    """Objects whose keys recur and whose strings look like keys, with white space anywhere."""
    kind = draw(st.sampled_from(["object", "list", "text", "number"])) if depth < 3 else "object"
    if depth == 0 or kind in ("text", "number"):
        return draw(_TEXTS) if kind == "text" else "1"
    inner = draw(st.lists(_json_texts(depth - 1), max_size=3))
    if kind == "list":
        return "[" + ",".join(inner) + "]"
    members = (f"{draw(_SPACES)}{draw(_TEXTS)}{draw(_SPACES)}:{draw(_SPACES)}{each}{draw(_SPACES)}" for each in inner)
    return "{" + ",".join(members) + "}"


@given(_json_texts())
def test_what_is_taken_for_free_of_duplicates_is(text: str) -> None:
    twice = False

    def look(pairs: list[tuple[str, object]]) -> dict[str, object]:
        nonlocal twice
        twice = twice or len(dict(pairs)) < len(pairs)
        return dict(pairs)

    json.loads(text, object_pairs_hook=look)
    try:
        decode_object(text.encode(), 10_000)
    except InvalidTicket as error:
        assert error.code == "duplicate_key"
        assert twice
    else:
        assert not twice


@given(st.recursive(st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner) | st.lists(inner)))
def test_a_pointer_finds_what_the_library_finds(document: object) -> None:
    for text in ("", "/a", "/0", "/a/b", "/a/0/b", "/-", "//", "/~0/~1"):
        pointer = JsonPointer(text)
        expected = pointer.resolve(document, None)
        found = value_at(document, pointer)
        assert found == expected or isinstance(expected, EndOfList)


@pytest.mark.parametrize(("opened", "closed"), [(b'{"a":', b"}"), (b'{"a":[', b"]}"), (b"[", b"]")])
def test_as_deep_as_is_allowed_is_a_ticket_on_every_python(opened: bytes, closed: bytes) -> None:
    count = (MOST_LEVELS - 2) // (opened.count(b"{") + opened.count(b"["))
    value = b'{"text": "hi", "metadata": {"a":' + opened * count + b"1" + closed * count + b"}}"
    assert parse_ticket(value, Intake(), 100_000).text == "hi"
    wide = b'{"text": "hi", "metadata": {"a":[' + b",".join([b"[]", b"{}"] * MOST_LEVELS) + b"]}}"
    assert parse_ticket(wide, Intake(), 100_000).text == "hi"
