"""Tickets: which bytes are one, and where in a helpdesk's payload its parts are found."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import field
from functools import cached_property
from typing import Annotated, Any, Literal

import orjson
from jsonpointer import JsonPointer, JsonPointerException
from pydantic import AfterValidator, ConfigDict, Field

from worker.core.canonicalisers import Canonicaliser, scored_text
from worker.core.categories import Strict
from worker.core.markup import visible_text
from worker.core.normalise import canonical
from worker.core.per_ticket import per_ticket
from worker.errors import InvalidTicket

MAX_ID_CHARS = 256

_KEY = re.compile(rb'"[ \t\n\r]*:')
"""Where a key may end, in JSON: that of every key, and now and then something inside a string."""
_SHALLOW = 16
MOST_LEVELS = 500
"""Of objects and lists in each other. Our own, since how deep Python reads depends on its version and on who calls."""


def _valid_pointer(value: str) -> str:
    try:
        JsonPointer(value)
    except JsonPointerException as error:
        raise ValueError(f"not a JSON Pointer: {error}") from error
    return value


Pointer = Annotated[str, AfterValidator(_valid_pointer)]
"""A JSON Pointer (RFC 6901), such as `/ticket/subject`."""


class Intake(Strict):
    """Where the parts of a ticket are in the payload, as JSON Pointers. `text` wins over `subject` and `body`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ignored_types=(cached_property,))

    id: Pointer = "/id"
    text: Pointer = "/text"
    subject: Pointer = "/subject"
    body: Pointer = "/body"
    tenant: Pointer = "/tenant"
    channel: Pointer = "/channel"
    language: Pointer = "/language"
    created_at: Pointer = "/created_at"
    metadata: Pointer = "/metadata"
    markup: Literal["plain", "html"] = Field("plain", description="html: tags are removed from text and body")

    @cached_property
    def pointers(self) -> Mapping[str, JsonPointer]:
        return {name: JsonPointer(getattr(self, name)) for name in type(self).model_fields if name != "markup"}

    def parts(self, document: Mapping[str, object]) -> dict[str, object]:
        """What each pointer points at, None where there is nothing."""
        get = document.get
        found = {name: get(key) for name, key in self._keys.items()}
        for name, pointer in self._deeper.items():
            found[name] = value_at(document, pointer)
        return found

    @cached_property
    def _keys(self) -> Mapping[str, str]:
        """The pointers that name a key of the outermost object, as nearly all do."""
        return {name: pointer.parts[0] for name, pointer in self.pointers.items() if len(pointer.parts) == 1}

    @cached_property
    def _deeper(self) -> Mapping[str, JsonPointer]:
        return {name: pointer for name, pointer in self.pointers.items() if name not in self._keys}


@per_ticket
class Ticket:
    """One ticket. `text` is canonical: what is scored is what is keyed; the original travels on as bytes."""

    id: str | None
    text: str
    tenant: str | None = None
    channel: str | None = None
    language: str | None = None
    created_at: str | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)
    shortened: str | None = None
    """What is scored in place of `text` where the rule set leaves parts out (core.canonicalisers)."""

    @property
    def scored_text(self) -> str:
        """What is scored and keyed; overrides read the whole `text`."""
        return self.text if self.shortened is None else self.shortened


def parse_ticket(
    value: bytes | None, intake: Intake, max_bytes: int, canonicalisers: Collection[Canonicaliser] = ()
) -> Ticket:
    """The ticket in these bytes. Raises InvalidTicket, whose code says what is wrong with them."""
    document = decode_object(value, max_bytes)
    found = intake.parts(document)
    text = found["text"] if found["text"] is not None else _subject_and_body(found)
    if not isinstance(text, str):
        raise InvalidTicket("wrong_type", f"text is a {_kind(text)}, not a string")
    if intake.markup == "html":
        text = visible_text(text)
    clean = canonical(text)
    if not clean:
        raise InvalidTicket("no_text", f"nothing to read at {intake.text}, {intake.subject} or {intake.body}")
    metadata = found["metadata"] if found["metadata"] is not None else {}
    if not isinstance(metadata, dict):
        raise InvalidTicket("wrong_type", f"metadata is a {_kind(metadata)}, not an object")
    language = found["language"]
    if language is not None and not isinstance(language, str):  # no code is a number; rules compare it as written
        raise InvalidTicket("wrong_type", f"language is a {_kind(language)}, not a string")
    return Ticket(
        _scalar("id", found["id"]),
        clean,
        _scalar("tenant", found["tenant"]),
        _scalar("channel", found["channel"]),
        _scalar("language", language),
        _scalar("created_at", found["created_at"]),
        metadata,
        scored_text(text, canonicalisers) if canonicalisers else None,
    )


def decode_object(value: bytes | None, max_bytes: int) -> dict[str, Any]:
    """The JSON object in these bytes, read strictly. Raises InvalidTicket."""
    if value is None:
        raise InvalidTicket("null_value", "the message has no value")
    if len(value) > max_bytes:
        raise InvalidTicket("too_large", f"{len(value)} bytes, and {max_bytes} are allowed")
    try:
        document = orjson.loads(value)  # strict: UTF-8, no NaN, no lone surrogates, no BOM, at most 1,024 levels
        if value.count(b"{") + value.count(b"[") > MOST_LEVELS and _is_too_deep(document):
            raise InvalidTicket("too_deep", f"nested more than {MOST_LEVELS} levels")
        # Last-one-wins would let a ticket show one text to the model and another to whoever reads it afterwards.
        if not _has_each_key_once(document, value):
            json.loads(value.decode(), object_pairs_hook=_no_duplicates)
    except _DuplicateKey as error:
        raise InvalidTicket("duplicate_key", "an object has the same key twice") from error
    except ValueError as error:
        _require_utf8(value)
        problem = str(error).split(":", 1)[0]  # the rest is a position; never echo the payload
        code = "too_deep" if "depth" in problem else "lone_surrogate" if "surrogate" in problem else "invalid_json"
        raise InvalidTicket(code, problem) from error
    if not isinstance(document, dict):
        raise InvalidTicket("not_an_object", f"the JSON is a {_kind(document)}, not an object")
    return document


def value_at(document: object, pointer: JsonPointer) -> object:
    """What the pointer points at, None where there is nothing: objects here, lists and their indices by the library."""
    here = document
    for part in pointer.parts:
        if type(here) is not dict:
            return pointer.resolve(document, None)
        here = here.get(part)
    return here


class _DuplicateKey(Exception):
    pass


def _has_each_key_once(document: object, value: bytes) -> bool:
    """True is sure; False says nothing. It takes a third of the time that looking at every pair does.

    `value` holds at least as many ends of keys as it has keys, and `document` as many keys as differ in their object.
    """
    if type(document) is not dict:
        return False
    keys, level = 0, [document]
    for _ in range(_SHALLOW):
        below = []
        for each in level:
            keys += len(each)
            for inner in each.values():
                if type(inner) is dict:
                    below.append(inner)
        if not below:
            # Where no white space stands behind any quotation mark, counting does what searching would. One character
            # is looked for in a fifth of the time that two take, and who writes on several lines writes few tickets.
            apart = b"\n" in value or b"\t" in value or b"\r" in value or b'" ' in value
            return keys == (len(_KEY.findall(value)) if apart else value.count(b'":'))
        level = below
    return False


def _is_too_deep(document: object) -> bool:
    level = [document]
    for _ in range(MOST_LEVELS):
        level = [
            inner
            for each in level
            for inner in (each.values() if type(each) is dict else each)  # type: ignore[attr-defined]
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return False
    return True


def _require_utf8(value: bytes) -> None:
    try:
        value.decode()
    except UnicodeDecodeError as error:
        raise InvalidTicket("invalid_utf8", f"byte {error.start} is not UTF-8") from error


def _no_duplicates(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) != len(pairs):
        raise _DuplicateKey


def _subject_and_body(found: Mapping[str, object]) -> object:
    """Both lines together, or the first part that is no string, for the caller to complain about."""
    parts: list[str] = []
    for name in ("subject", "body"):
        part = found[name]
        if isinstance(part, str):
            parts.append(part)
        elif part is not None:
            return part
    return "\n".join(parts)


def _scalar(name: str, value: object) -> str | None:
    """Strings as they are, whole numbers as text (helpdesks number their tickets)."""
    if value is None or (type(value) is str and len(value) <= MAX_ID_CHARS):
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InvalidTicket("wrong_type", f"{name} is a {_kind(value)}, not a string or number")
    text = str(value)
    if len(text) > MAX_ID_CHARS:
        raise InvalidTicket("wrong_type", f"{name} has {len(text)} characters, and {MAX_ID_CHARS} are allowed")
    return text


def _kind(value: object) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
