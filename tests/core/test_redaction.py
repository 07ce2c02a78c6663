"""Redaction: what is personal by its form goes, what is none stays, and no text takes more than its length in time."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.sets import rule_set
from worker.core.cache_key import ScoreKey
from worker.core.canonicalisers import VERSIONS, normaliser, scored_text
from worker.core.redaction import KINDS, Kind, redacted
from worker.core.steering import flagger_for
from worker.core.ticket import Intake, parse_ticket

KOREAN = {
    "email_addresses": "[이메일]",
    "resident_numbers": "[주민등록번호]",
    "card_numbers": "[카드번호]",
    "phone_numbers": "[전화번호]",
}
ENGLISH = {
    "email_addresses": "[EMAIL]",
    "resident_numbers": "[RESIDENT NUMBER]",
    "card_numbers": "[CARD]",
    "phone_numbers": "[PHONE]",
}
PERSONAL: list[tuple[Kind, str]] = [
    ("email_addresses", "hong@desk.example"),
    ("email_addresses", "hong.gil-dong+bills_1%x@mail.desk.co.kr"),
    ("email_addresses", "01012345678@desk.example"),
    ("email_addresses", "ｈｏｎｇ＠ｄｅｓｋ．ｋｒ"),
    ("resident_numbers", "900101-1234567"),
    ("resident_numbers", "9001012234567"),
    ("resident_numbers", "000229-3234567"),
    ("resident_numbers", "900101 - 1234567"),
    ("resident_numbers", "900101–1234567"),
    ("resident_numbers", "９００１０１－１２３４５６７"),
    ("resident_numbers", "900101-1******"),
    ("card_numbers", "4111111111111111"),
    ("card_numbers", "4111 1111 1111 1111"),
    ("card_numbers", "4111-1111-1111-1111"),
    ("card_numbers", "5555 5555 5555 4444"),
    ("card_numbers", "3782 822463 10005"),
    ("card_numbers", "30569309025904"),
    ("card_numbers", "４１１１－１１１１－１１１１－１１１１"),
    ("phone_numbers", "010-1234-5678"),
    ("phone_numbers", "010 1234 5678"),
    ("phone_numbers", "010.1234.5678"),
    ("phone_numbers", "01012345678"),
    ("phone_numbers", "011-234-5678"),
    ("phone_numbers", "０１０－１２３４－５６７８"),
    ("phone_numbers", "02-123-4567"),
    ("phone_numbers", "02)1234-5678"),
    ("phone_numbers", "(031) 123-4567"),
    ("phone_numbers", "070-1234-5678"),
    ("phone_numbers", "0505-123-4567"),
    ("phone_numbers", "+82 10-1234-5678"),
    ("phone_numbers", "+82-2-123-4567"),
    ("phone_numbers", "+82 (0)10 1234 5678"),
    ("phone_numbers", "0082-10-1234-5678"),
    ("phone_numbers", "+821012345678"),
    ("phone_numbers", "+1 (415) 555-2671"),
    ("phone_numbers", "(415) 555-2671"),
    ("phone_numbers", "415-555-2671"),
    ("phone_numbers", "+44 20 7946 0958"),
    ("phone_numbers", "020 7946 0958"),
    ("phone_numbers", "+49 151 23456789"),
    ("phone_numbers", "+33 6 12 34 56 78"),
    ("phone_numbers", "06 12 34 56 78"),
    ("phone_numbers", "+81 90-1234-5678"),
    ("phone_numbers", "+86 131 2345 6789"),
    ("phone_numbers", "+84 91 234 56 78"),
    ("phone_numbers", "+998 90 123 45 67"),
]
NOT_PERSONAL = [
    "900230-1234567",  # no such day
    "001329-3234567",
    "900101-9234567",  # born before 1900
    "010229-3234567"[::-1],
    "4111 1111 1111 1112",  # Luhn
    "1234 5678 9012 3456",
    "1588-1234",  # a firm
    "119",
    "2026-03-02 10:30",
    "01-02-2026 10:30",
    "2026. 3. 2. 오전 10시 30분",
    "2026-03-02T10:30:00Z",
    "127.0.0.1:9092",
    "192.168.100.200",
    "₩1,234,567",
    "12,000원",
    "v3.11.7 (2024-11-30)",
    "주문 20260302-000123",
    "ticket 0012345678",
    "1712345678901",  # milliseconds since 1970
    "hong@desk",
    "@desk.example",
    "a @ b.example",
    "room 101-1203",
    "101동 1203호",
    "3 + 4 = 7",
]


@pytest.mark.parametrize(("kind", "number"), PERSONAL)
@pytest.mark.parametrize(
    ("around", "names"),
    [
        ("{}", None),
        ("call {} now", ENGLISH),
        ("연락처는 {}입니다.", KOREAN),
        ("연락처:{},감사합니다", KOREAN),
        ("“{}”, 12 3", ENGLISH),
        ("a\n{}\nb", ENGLISH),
        ("{0} {0}", None),
    ],
)
def test_what_is_personal_is_replaced_by_what_it_is(
    kind: Kind, number: str, around: str, names: dict[str, str] | None
) -> None:
    expected = around.format((names or ENGLISH)[kind])
    assert redacted(around.format(number)) == expected
    assert redacted(around.format(number), [kind]) == expected


@pytest.mark.parametrize("text", NOT_PERSONAL)
def test_what_only_looks_like_it_stays(text: str) -> None:
    assert redacted(text) == text
    assert redacted(f"접수 {text} 입니다") == f"접수 {text} 입니다"


@pytest.mark.parametrize("seventh", "5678")
def test_an_alien_registration_number_is_told_from_a_residents(seventh: str) -> None:
    assert redacted(f"call 900101-{seventh}234567") == "call [ALIEN REGISTRATION NUMBER]"
    assert redacted(f"등록 900101-{seventh}234567") == "등록 [외국인등록번호]"


def test_no_check_digit_is_asked_for() -> None:
    """Since October 2020 there is none."""
    assert {redacted(f"900101-123456{last}") for last in range(10)} == {"[RESIDENT NUMBER]"}


def test_an_address_in_hangul_is_one_too() -> None:
    assert redacted("메일은 홍길동@회사.한국 입니다") == "메일은 [이메일] 입니다"


def test_only_what_is_asked_for_is_replaced() -> None:
    text = "900101-1234567 4111111111111111 010-1234-5678 hong@desk.example"
    assert redacted(text, ()) == text
    for kind in KINDS:
        (gone,) = set(text.split()) - set(redacted(text, [kind]).split())
        assert (kind, gone) in PERSONAL


def test_two_numbers_beside_each_other_are_two() -> None:
    assert redacted("010-1234-5678 02-123-4567") == "[PHONE] [PHONE]"
    assert redacted("1234 4111 1111 1111 1111 12") == "1234 [CARD] 12"
    assert redacted("+82 10 1234 5678 3") == "[PHONE] 3"


NEAR = st.lists(
    st.one_of(
        st.sampled_from([number for _, number in PERSONAL] + NOT_PERSONAL),
        st.text("0123456789-. +()@a한[]０＠–", max_size=12),
    ),
    max_size=8,
).map("".join)


@given(st.one_of(st.text(), NEAR))
def test_a_second_time_changes_nothing(text: str) -> None:
    once = redacted(text)
    assert redacted(once) == once


@given(NEAR, NEAR, st.sampled_from(PERSONAL))
def test_nothing_before_or_behind_it_keeps_a_number(before: str, after: str, personal: tuple[Kind, str]) -> None:
    kind, number = personal
    found = redacted(f"{before}; {number} ; {after}")
    assert f"; {ENGLISH[kind]} ;" in found or f"; {KOREAN[kind]} ;" in found


HOSTILE = {
    "digits": "1",
    "spaced digits": "1 ",
    "groups of a card": "4111 ",
    "halves of a phone": "010-1234-",
    "halves of a resident number": "900101-",
    "prefixes": "+82 ",
    "pluses": "+1",
    "zeros": "0-",
    "brackets": "(0",
    "at signs": "@",
    "addresses that never end": "a.a@a.a",
    "dots": "a.",
    "one at, and dots": "x@" + "a." * 50,
    "full width": "４",
    "dashes and a digit": "-" * 20 + "1",
    "cards": "4111 1111 1111 1111 ",
}


@pytest.mark.parametrize("piece", HOSTILE.values(), ids=[name.replace(" ", "-") for name in HOSTILE])
def test_a_megabyte_takes_eight_times_as_long_as_an_eighth_of_it(piece: str) -> None:
    """Quadratic: 64 times. The processor's own time, since the machine may be busy."""

    def seconds(length: int) -> float:
        text = (piece * (length // len(piece) + 1))[:length]
        started = time.process_time()
        redacted(text)
        return time.process_time() - started

    assert seconds(1_000_000) < 24 * seconds(125_000) + 0.2


class TestScoring:
    """Off unless a rule set names it; then what is scored and what is keyed are the same, redacted text."""

    TEXT = "전화 010-1234-5678 카드 4111 1111 1111 1111 메일 hong@desk.example 주민 900101-1234567 끊김"

    def test_nothing_is_redacted_unless_it_is_named(self) -> None:
        for named in ((), ("quoted_replies", "signatures", "urls", "timestamps", "ticket_numbers")):
            assert "010-1234-5678" in scored_text(self.TEXT, named)

    def test_what_is_named_is_redacted_before_anything_is_scored_or_keyed(self) -> None:
        value = b'{"text": "%s"}' % self.TEXT.encode()
        ticket = parse_ticket(value, Intake(), 10_000, KINDS)
        assert ticket.scored_text == "전화 [전화번호] 카드 [카드번호] 메일 [이메일] 주민 [주민등록번호] 끊김"
        assert ticket.text == self.TEXT, "overrides read it as it came"

    def test_two_tickets_that_differ_in_a_number_are_one_to_the_cache(self) -> None:
        key = ScoreKey(
            b"s" * 32,
            rule_set="r",
            model="m",
            tokenizer="t",
            prompt="p",
            label_token_ids=(1, 2),
            category_set="c",
            normaliser=normaliser(KINDS),
        )
        one, other = (scored_text(f"call {number} please", KINDS) for number in ("010-1234-5678", "02-123-4567"))
        assert key(None, one) == key(None, other)

    def test_a_ticket_of_nothing_else_is_redacted_too(self) -> None:
        assert scored_text("010-1234-5678", KINDS) == "[ PHONE]"  # canonical: no `[` may open a token

    def test_it_changes_the_fingerprint(self) -> None:
        assert normaliser(KINDS[-1:]) != normaliser(())
        assert "phone_numbers/1" in normaliser(KINDS)

    @given(st.one_of(st.text(), NEAR))
    def test_together_with_all_others_a_second_time_changes_nothing(self, text: str) -> None:
        once = scored_text(text, tuple(VERSIONS))
        assert scored_text(once, tuple(VERSIONS)) == once

    @pytest.mark.parametrize("text", ["at 2026-03-02 10:30(415) 555-2671", "at 0:10４111-1111-1111-1111"])
    def test_a_number_that_begins_where_a_time_goes_is_found(self, text: str) -> None:
        once = scored_text(text, tuple(VERSIONS))
        assert "55" not in once and "1111" not in once
        assert scored_text(once, tuple(VERSIONS)) == once

    def test_an_address_in_a_url_leaves_no_half_behind(self) -> None:
        assert "hong" not in scored_text("see user.hong@www.desk.example/x now", ("email_addresses", "urls"))

    def test_a_placeholder_is_not_taken_for_words_to_the_router(self) -> None:
        flagger = flagger_for(rule_set())
        for name in (*KOREAN.values(), *ENGLISH.values(), "[ALIEN REGISTRATION NUMBER]", "[외국인등록번호]"):
            assert not list(flagger.find(scored_text(f"call {name} now", KINDS)))
