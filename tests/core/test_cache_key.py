"""Cache keys: equal only where every field is, and unreadable without the secret."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from worker.core.cache_key import ScoreKey, cacheable
from worker.core.scores import LabelScores

SECRET = b"a secret of the deployment"


def _maker(
    secret: bytes = SECRET,
    *,
    rule_set: str = "desk",
    model: str = "m",
    tokenizer: str = "t",
    prompt: str = "p",
    label_token_ids: Sequence[int] = (1, 2),
    category_set: str = "c",
    normaliser: str = "1",
) -> ScoreKey:
    return ScoreKey(
        secret,
        rule_set=rule_set,
        model=model,
        tokenizer=tokenizer,
        prompt=prompt,
        label_token_ids=label_token_ids,
        category_set=category_set,
        normaliser=normaliser,
    )


def test_the_same_fields_give_the_same_key() -> None:
    key = _maker()("acme", "VPN 접속이 안 됩니다")
    assert key == _maker()("acme", "VPN 접속이 안 됩니다")
    scope, _, digest = key.partition(":")
    assert (scope, len(digest)) == ("desk", 40)
    int(digest, 16)


def test_every_field_changes_the_key() -> None:
    keys = [
        _maker()("acme", "text"),
        _maker(b"another secret")("acme", "text"),
        _maker(model="n")("acme", "text"),
        _maker(tokenizer="u")("acme", "text"),
        _maker(prompt="q")("acme", "text"),
        _maker(label_token_ids=(2, 1))("acme", "text"),
        _maker(label_token_ids=(12,))("acme", "text"),
        _maker(category_set="d")("acme", "text"),
        _maker(rule_set="e")("acme", "text"),
        _maker(normaliser="1+urls/1")("acme", "text"),
        _maker()("acne", "text"),
        _maker()(None, "text"),
        _maker()("", "text"),
        _maker()("acme", "texts"),
    ]
    assert len(set(keys)) == len(keys)


def test_neither_flagged_nor_incomplete_answers_are_kept() -> None:
    whole = LabelScores.from_logprobs((-0.1, -3.0))
    assert cacheable(whole)
    assert not cacheable(whole, flagged=True)
    assert not cacheable(LabelScores.from_logprobs((-0.1, -3.0), unknown=(1,)))


FIELDS = st.tuples(*[st.text(alphabet="ab:|-0123\x1f,", max_size=4)] * 4, st.none() | st.text("a:1-", max_size=3))


@given(FIELDS, FIELDS)
@example(("ab", "c", "p", "x", None), ("a", "bc", "p", "x", None))
@example(("a:", "b", "p", "x", None), ("a", ":b", "p", "x", None))
@example(("p", "m", "1:x", "x", None), ("p", "m1:", "x", "x", None))
def test_fields_never_run_into_each_other(
    left: tuple[str, str, str, str, str | None], right: tuple[str, str, str, str, str | None]
) -> None:
    def key(fields: tuple[str, str, str, str, str | None]) -> str:
        return _maker(model=fields[0], tokenizer=fields[1], prompt=fields[2])(fields[4], fields[3])

    assert (key(left) == key(right)) == (left == right)


@pytest.mark.parametrize(
    ("left", "right"),
    [(("a", "b:c"), ("a:b", "c")), (("1:", "x"), ("1", ":x")), ((None, "1:a"), ("-", "1:a")), (("", "x"), (None, "x"))],
)
def test_a_separator_inside_a_field_moves_nothing(left: tuple[str | None, str], right: tuple[str | None, str]) -> None:
    assert _maker()(*left) != _maker()(*right)


def test_making_a_key_leaves_the_maker_as_it_was() -> None:
    maker = _maker()
    first = maker("acme", "one")
    maker("acme", "two")
    assert maker("acme", "one") == first


def test_the_whole_of_a_long_secret_counts() -> None:
    assert _maker(b"x" * 100 + b"a")(None, "t") != _maker(b"x" * 100 + b"b")(None, "t")


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="secret"):
        _maker(b"")
