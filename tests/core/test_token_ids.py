"""Token ids: the ticket by itself as plain text, the prompt around it as it was, and a fingerprint of its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.core.test_prompt import Words
from tests.core.test_two_levels import city
from worker.core.labels import Labels
from worker.core.primitives import ChooseOne
from worker.core.prompt import Prompt
from worker.core.scores import LabelScores, ScoreRequest
from worker.core.token_ids import InTokenIds, MadeHarmless
from worker.core.two_levels import choose_two_level_labels
from worker.errors import ConfigError, LabelError, RequestRefused
from worker.runtime.sent import Sent

BOS, CONTROL = 1, 2


class Letters:
    """One id a character; `#` is a control token to everything but `plain`."""

    probes = ("probe",)

    def __init__(self, joins: str = "") -> None:
        self.joins = joins
        """Two characters that are one token where they stand together."""
        self.wholes = 0

    def whole(self, text: str) -> tuple[int, ...]:
        self.wholes += 1
        return (BOS, *self.marked(text))

    def marked(self, text: str) -> tuple[int, ...]:
        joined = text.replace(self.joins, "\ue000") if self.joins else text
        return tuple(CONTROL if char == "#" else ord(char) for char in joined)

    def plain(self, text: str) -> tuple[int, ...]:
        if "!" in text:
            raise RequestRefused("it cannot")
        return tuple(ord(char) for char in text)

    def harmless(self, text: str) -> str:
        return text.replace("#", "_")

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(self.whole(text)) for text in texts]


def asked(suffix: str = "\n#>") -> ChooseOne:
    return ChooseOne(Prompt("#p", suffix), Labels((), ()))


def test_only_the_prompts_own_control_tokens_are_any() -> None:
    (request,) = next(InTokenIds(asked(), Letters()).plan("a#b"))
    assert request.prefix == (BOS, CONTROL, ord("p"))
    assert request.item == (*map(ord, " a#b\n"), CONTROL, ord(">"))


def test_the_prefix_is_tokenized_once_for_all_tickets() -> None:
    tokenizer = Letters()
    primitive = InTokenIds(asked(), tokenizer)
    for number in range(5):
        primitive.request(f"ticket {number}")
    assert tokenizer.wholes == 1


async def test_every_round_of_a_plan_is_put_into_ids() -> None:
    words, categories = Words(), city()
    assert categories.two_levels is not None
    levels = await choose_two_level_labels(categories, categories.two_levels, words)

    class Local(Letters):
        def marked(self, text: str) -> tuple[int, ...]:
            return tuple(words.encode(text))

        plain = whole = marked

    plan = InTokenIds(levels, Local()).plan("text")
    rounds = [next(plan)]
    with pytest.raises(StopIteration) as end:
        while True:
            size = len(rounds[-1][0].label_token_ids)
            rounds.append(plan.send([LabelScores.from_logprobs((-0.5, *[-3.0] * (size - 1)))]))
    assert isinstance(end.value.value, LabelScores)
    assert len(rounds) > 1
    assert all(isinstance(r.item, tuple) and isinstance(r.prefix, tuple) for requests in rounds for r in requests)


def test_a_label_that_is_another_token_behind_the_cue_alone_is_refused() -> None:
    one = ChooseOne(Prompt("p", ":"), Labels(("ab",), (ord("a"),)))
    with pytest.raises(LabelError, match="behind the cue alone.*ab"):
        InTokenIds(one, Letters())


def test_ids_have_a_fingerprint_of_their_own_and_text_made_harmless_keeps_its() -> None:
    plain = asked()
    assert InTokenIds(plain, Letters()).prompt_fingerprint != plain.prompt_fingerprint
    assert MadeHarmless(plain, Letters()).prompt_fingerprint == plain.prompt_fingerprint
    assert InTokenIds(plain, Letters()).labels_fingerprint == plain.labels_fingerprint


def test_text_is_made_harmless_before_it_is_asked_about() -> None:
    assert MadeHarmless(asked(), Letters()).request("a#b") == ScoreRequest("#p", " a_b\n#>", ())


def test_a_ticket_that_cannot_be_made_plain_is_refused_at_the_first_step() -> None:
    with pytest.raises(RequestRefused):
        next(InTokenIds(asked(), Letters()).plan("a!"))


async def test_another_models_tokenizer_is_refused_with_the_place_where_they_part() -> None:
    class Engine:
        def __init__(self, tokenizer: Letters) -> None:
            self.tokenize = tokenizer.tokenize

    await Sent(Letters()).check(asked(), Engine(Letters()))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not the tokenizer of the engine's model: they differ from token 2 on"):
        await Sent(Letters()).check(asked(), Engine(Letters(joins="ro")))  # type: ignore[arg-type]


async def test_tickets_are_counted_here_where_the_tokenizer_is() -> None:
    async def nobody(texts: Sequence[str]) -> list[list[int]]:
        raise AssertionError("the engine was asked")

    assert [len(ids) for ids in await Sent(Letters()).counting(nobody)(["abc", "d"])] == [3, 1]
