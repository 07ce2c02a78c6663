"""Token ids: a question whose prompt is sent as ids, so that no text of a ticket is ever looked at for control tokens.

The prefix is tokenized once, with the begin-of-sequence token and the control tokens of its turns; the ticket alone,
as text and nothing else; what follows it, with its control tokens. That cuts tokens at the seams where one text would
not, and so changes scores: how a prompt is tokenized is part of its fingerprint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from worker.core.digest import fingerprint
from worker.core.labels import Labels
from worker.core.primitives import ChooseOne, Plan, Primitive, TwoLevel
from worker.core.prompt import Prompt
from worker.core.scores import ScoreRequest
from worker.errors import LabelError


class LocalTokenizer(Protocol):
    """The engine's tokenizer, in this process."""

    @property
    def probes(self) -> Sequence[str]:
        """Texts by which two tokenizers are told apart.

        Not every control token: a file may list some that the engine's model lacks (those for images, say), and none
        of them ever leaves this process for a ticket.
        """

    def whole(self, text: str) -> tuple[int, ...]:
        """As a whole prompt: with BOS where the model wants one, control tokens made of what spells them."""

    def marked(self, text: str) -> tuple[int, ...]:
        """A part of a prompt: control tokens made of what spells them, nothing added."""

    def plain(self, text: str) -> tuple[int, ...]:
        """Nothing but text. Raises RequestRefused where a control token came of it all the same."""

    def harmless(self, text: str) -> str:
        """Canonical text in which this tokenizer finds no control token. Raises RequestRefused where it cannot be."""


@dataclass(frozen=True, slots=True)
class InTokenIds:
    """A primitive that asks in ids what `asked` would ask in text."""

    asked: Primitive
    tokenizer: LocalTokenizer
    _known: dict[tuple[str, bool], tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)
    """Prefixes (True) and what follows tickets (False): a few texts, the same for every ticket."""

    def __post_init__(self) -> None:
        for one in questions_of(self.asked):
            _check_labels(one, self.tokenizer)

    @property
    def prompt(self) -> Prompt:
        return self.asked.prompt

    @property
    def labels(self) -> Labels:
        return self.asked.labels

    @property
    def prompt_fingerprint(self) -> str:
        return fingerprint("token-ids/1", self.asked.prompt_fingerprint)

    @property
    def labels_fingerprint(self) -> str:
        return self.asked.labels_fingerprint

    @property
    def longest_prompt(self) -> Prompt:
        return self.asked.longest_prompt

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.asked.token_ids

    def request(self, text: str) -> ScoreRequest:
        """Raises RequestRefused as the tokenizer does."""
        return self._in_ids(self.asked.request(text), f" {text}", self.tokenizer.plain(f" {text}"))

    def plan(self, text: str) -> Plan:
        """Raises RequestRefused as the tokenizer does, at its first step."""
        ticket, ids = f" {text}", self.tokenizer.plain(f" {text}")
        plan = self.asked.plan(text)
        requests = next(plan)
        while True:
            rows = yield tuple(self._in_ids(request, ticket, ids) for request in requests)
            try:
                requests = plan.send(rows)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]  # as Plan says

    def _in_ids(self, request: ScoreRequest, ticket: str, ids: tuple[int, ...]) -> ScoreRequest:
        prefix, item = request.prefix, request.item
        if not (isinstance(prefix, str) and isinstance(item, str) and item.startswith(ticket)):
            raise ValueError("a request is put into token ids that is not text with the ticket behind the prefix")
        rest = item[len(ticket) :]
        for key in ((prefix, True), (rest, False)):
            if key not in self._known:
                self._known[key] = self.tokenizer.whole(prefix) if key[1] else self.tokenizer.marked(rest)
        return ScoreRequest(self._known[prefix, True], ids + self._known[rest, False], request.label_token_ids)


@dataclass(frozen=True, slots=True)
class MadeHarmless:
    """A primitive that asks in text, in which the engine's own tokenizer found no control token."""

    asked: Primitive
    tokenizer: LocalTokenizer

    @property
    def prompt(self) -> Prompt:
        return self.asked.prompt

    @property
    def labels(self) -> Labels:
        return self.asked.labels

    @property
    def prompt_fingerprint(self) -> str:
        """The same: it changes no ticket but those that spell a control token, as the normaliser's version says."""
        return self.asked.prompt_fingerprint

    @property
    def labels_fingerprint(self) -> str:
        return self.asked.labels_fingerprint

    @property
    def longest_prompt(self) -> Prompt:
        return self.asked.longest_prompt

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.asked.token_ids

    def request(self, text: str) -> ScoreRequest:
        """Raises RequestRefused as the tokenizer does."""
        return self.asked.request(self.tokenizer.harmless(text))

    def plan(self, text: str) -> Plan:
        """Raises RequestRefused as the tokenizer does."""
        return self.asked.plan(self.tokenizer.harmless(text))


def questions_of(primitive: Primitive) -> tuple[ChooseOne, ...]:
    """Every choice between labels that a primitive may ask for."""
    match primitive:
        case ChooseOne():
            return (primitive,)
        case TwoLevel():
            return (primitive.departments, *(one for one in primitive.inside if one is not None))
        case InTokenIds() | MadeHarmless():
            return questions_of(primitive.asked)
        case _:
            asked = getattr(primitive, "orders", ())
            return tuple(one for each in asked for one in questions_of(each))


def _check_labels(question: ChooseOne, tokenizer: LocalTokenizer) -> None:
    """Raises LabelError where a label is another token behind a cue that is tokenized by itself."""
    suffix = question.prompt.suffix
    bare = tokenizer.marked(suffix)
    moved = [
        word
        for word, token in zip(question.labels.words, question.labels.token_ids, strict=True)
        if tokenizer.marked(f"{suffix} {word}") != (*bare, token)
    ]
    if moved:
        raise LabelError("not the same token behind the cue alone as behind the whole prompt (ROUTER_SEND_IDS)", moved)
