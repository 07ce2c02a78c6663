"""Canonicalisers: what they leave out is what they say, words stay, and no input takes more than one pass."""

from __future__ import annotations

import time
from itertools import combinations

import orjson
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.core.sets import rule_set
from worker.core.cache_key import ScoreKey
from worker.core.canonicalisers import VERSIONS, Canonicaliser, normaliser, scored_text
from worker.core.normalise import NORMALISER_VERSION, canonical
from worker.core.redaction import KINDS, redacted
from worker.core.rules import RuleSet
from worker.core.ticket import Intake, parse_ticket

ALL: tuple[Canonicaliser, ...] = tuple(VERSIONS)
IMPERSONAL = tuple(name for name in ALL if name not in KINDS)

GMAIL = "On Mon, Mar 2, 2026 at 9:00 AM Ann Lee <ann@desk.example> wrote:"
GMAIL_KOREAN = "2026년 3월 2일 (월) 오전 9:00, 홍길동 <hong@desk.example>님이 작성:"
OUTLOOK = "From: Desk\nSent: Monday, March 2, 2026 9:00 AM\nTo: Ann\nSubject: RE: refund"
OUTLOOK_KOREAN = "보낸 사람: 민원실\n보낸 날짜: 2026년 3월 2일 월요일 오전 9:00\n받는 사람: 홍길동\n제목: RE: 단수"


@pytest.mark.parametrize(
    ("came", "scored"),
    [
        (f"I was not charged at all.\n\n{GMAIL}\n\n> You were charged.\n> Bye\n", "I was not charged at all."),
        (
            f"I was not charged at all.\n\n{GMAIL[:45]}\n{GMAIL[45:]}\n\n> You were charged.\n",
            "I was not charged at all.",
        ),
        (f"I was not charged at all.\n{GMAIL}\nYou were charged.", "I was not charged at all."),
        (
            f"{GMAIL}\n> You were charged.\n\nI was not charged at all.\n> Twice.\nAnd not twice.",
            "I was not charged at all. And not twice.",
        ),
        (
            f"아직 복구되지 않았으니 빨리 확인해 주세요.\n\n{GMAIL_KOREAN}\n\n> 단수입니다.",
            "아직 복구되지 않았으니 빨리 확인해 주세요.",
        ),
        (
            f"아직 복구되지 않았으니 빨리 확인해 주세요.\n{GMAIL_KOREAN[:30]}\n{GMAIL_KOREAN[30:]}\n단수입니다.",
            "아직 복구되지 않았으니 빨리 확인해 주세요.",
        ),
        (
            f"I was not charged at all.\n________________________________\n{OUTLOOK}\n\nYou were charged.",
            "I was not charged at all.",
        ),
        (
            f"아직 복구되지 않았으니 빨리 확인해 주세요.\n{OUTLOOK_KOREAN}\n\n단수입니다.",
            "아직 복구되지 않았으니 빨리 확인해 주세요.",
        ),
        ("I was not charged at all.\n-----Original Message-----\nYou were charged.", "I was not charged at all."),
        (
            "아직 복구되지 않았으니 빨리 확인해 주세요.\n---------[ 받은 메일 내용 ]----------\n단수입니다.",
            "아직 복구되지 않았으니 빨리 확인해 주세요.",
        ),
        (
            "아직 복구되지 않았으니 빨리 확인해 주세요.\n-----원본 메시지-----\n단수입니다.",
            "아직 복구되지 않았으니 빨리 확인해 주세요.",
        ),
        (
            "I was not charged at all.\n##- Please type your reply above this line -##\nYou were charged.",
            "I was not charged at all.",
        ),
    ],
)
def test_quoted_replies_are_left_out(came: str, scored: str) -> None:
    assert scored_text(came, ("quoted_replies",)) == scored


@pytest.mark.parametrize(
    "text",
    [
        f"FW: please handle\n-----Original Message-----\n{OUTLOOK}\n\nI was charged twice.",
        "전달: 처리 바랍니다\n-----원본 메시지-----\n단수입니다.",
        f"{GMAIL}\nI was charged twice.",  # nothing would be left
        "> npm start\nfails with\n> Error 500",
        "On March 3 your agent wrote:\nYou will not be charged.\nBut I was charged!",
        "From: the 2nd floor\nwe hear water. Subject: leak",
        "Charged --- not charged",
    ],
)
def test_what_is_no_quoted_reply_stays(text: str) -> None:
    assert scored_text(text, ("quoted_replies",)) == canonical(text)


@pytest.mark.parametrize(
    ("came", "scored"),
    [
        ("I was not charged at all.\n-- \nAnn Lee\nAcme", "I was not charged at all."),
        ("I was not charged at all.\n--\nAnn Lee\nann@acme.example", "I was not charged at all."),
        (
            "언제쯤 복구되는지 확인해 주실 수 있나요?\n--\n홍길동\n02-123-4567",
            "언제쯤 복구되는지 확인해 주실 수 있나요?",
        ),
        ("I was not charged at all.\n\nSent from my iPhone", "I was not charged at all."),
        ("I was not charged at all.\nGet Outlook for iOS <https://aka.ms/o0ukef>\n", "I was not charged at all."),
        ("단수입니다.\n나의 iPhone에서 보냄", "단수입니다."),
        ("단수입니다.\n삼성 Galaxy 스마트폰에서 보냈습니다.", "단수입니다."),
        ("I was not charged at all.\n-- \nAnn\n\nSent from my Galaxy S24", "I was not charged at all."),
    ],
)
def test_signatures_are_left_out(came: str, scored: str) -> None:
    assert scored_text(came, ("signatures",)) == scored


@pytest.mark.parametrize("real", ["The leak is back.", "하수구가 넘쳐요"])
def test_a_few_words_above_a_quotation_or_a_signature_take_nothing_with_them(real: str) -> None:
    for text in (
        f"See below.\n{GMAIL}\n{real}",
        f"소파 버려주세요.\n-----원본 메시지-----\n{real}",
        f"Sofa.\n-- \n{real}",
    ):
        assert scored_text(text, ("quoted_replies", "signatures")) == canonical(text)


@pytest.mark.parametrize(
    "text",
    [
        "Charged once.\n--\nNot charged twice.",
        "One.\n-- \nTwo.\n-- \nThree.",
        "I was not charged at all.\n-- \n" + "A line of a long appendix.\n" * 20,
        "-- \nAnn",
        "택배는 서울에서 보냈습니다.\n은행에서 보냄",
        "It was\nSent from my bank account",
        "Best regards,\nand please cancel my order",
    ],
)
def test_what_is_no_signature_stays(text: str) -> None:
    assert scored_text(text, ("signatures",)) == canonical(text)


@pytest.mark.parametrize(
    ("came", "scored"),
    [
        ("See https://desk.example/t/1?x=2#y, and (www.acme.example/a).", "See …, and (…)."),
        ("https://desk.example/에서 단수", "…에서 단수"),
        ("Not an address: https:// www. acme.example", "Not an address: https:// www. acme.example"),
    ],
)
def test_addresses_give_way_to_a_gap(came: str, scored: str) -> None:
    assert scored_text(came, ("urls",)) == scored


@pytest.mark.parametrize(
    "stamp",
    [
        "2026-03-02",
        "2026-03-02T08:00:00Z",
        "2026-03-02 08:00:00.123 +09:00",
        "2026/3/2",
        "2026. 3. 2.",
        "2026. 3. 2. (월) 오전 9:30",
        "2026년 3월 2일",
        "2026년 3월 2일 (월) 오전 9시 30분",
        "3월 2일",
        "오후 3시",
        "9시 30분",
        "Mon, Mar 2, 2026 at 9:00 AM",
        "2 March 2026",
        "March 2nd, 2026",
        "03/02/2026",
        "2.3.2026",
        "09:30",
        "09:30:15 KST",
        "9:30 p.m.",
    ],
)
def test_a_time_gives_way_to_one_gap(stamp: str) -> None:
    assert scored_text(f"charged ({stamp}) twice", ("timestamps",)) == "charged (…) twice"


@pytest.mark.parametrize(
    "number",
    [
        "ticket #12345",
        "Ticket 12345".replace(" ", " number "),
        "Ticket ID: ABC-12345",
        "case no. 00123456",
        "Request #5001",
        "[#123456]",
        "[Ticket#2026030210000012]",
        "INC0012345",
        "접수번호 2026-0001234",
        "문의번호: 12345",
        "민원 번호는 1234567",
    ],
)
def test_a_ticket_number_gives_way_and_its_words_stay(number: str) -> None:
    left = scored_text(f"charged, {number} not answered", ("ticket_numbers",))
    assert "…" in left
    assert not any(char.isdigit() for char in left)
    assert left.startswith("charged, ")
    assert left.endswith(" not answered")


@pytest.mark.parametrize(
    "text",
    [
        "charged 12,000 won in room 302, not 20931",
        "302호 5000원 단수, 3층 12동",
        "#302 is locked, order 10231, invoice 20931",
        "in case 300 people come, request 5000 more",
        "문의 5000원, 접수 12345, 접수번호 302호",
        "version 3.2.2026.1, phone 010-2026-0302, address 192.168.20.26",
        "open 24시간, May 2 be charged, 24/7, a 16:9 screen, port 10.0.0.1:80",
        "00:1A:2B:3C:4D:5E",
        "오후 3시간 동안 단수",
        "ticket # 12 and ticket #120,000",
    ],
)
def test_amounts_rooms_and_other_numbers_stay(text: str) -> None:
    assert scored_text(text, IMPERSONAL) == text


def test_a_gap_in_square_brackets_leaves_the_text_canonical() -> None:
    left = scored_text("[2026-03-02] fails", ("timestamps",))
    assert left == canonical(left) == "[ …] fails"


def test_nothing_else_is_left_of_a_ticket_that_is_nothing_else() -> None:
    for text in ("https://desk.example/t/1", "2026-03-02", "#12345", "09:30 09:31"):
        assert scored_text(text, ALL) == text


WORDS = [
    "charged",
    "not",
    "단수",
    "복구",
    "되지",
    "않았습니다",
    "미납",
    "납부",
    "5000원",
    "302호",
    "room",
    "302",
    "12,000",
    "no",
]
PIECES = [
    *WORDS,
    GMAIL,
    GMAIL_KOREAN,
    *OUTLOOK.split("\n"),
    *OUTLOOK_KOREAN.split("\n"),
    "> quoted",
    ">",
    "wrote:",
    "작성:",
    "On 2026 09:00",
    "-- ",
    "--",
    "a@b",
    "Sent from my iPhone",
    "-----Original Message-----",
    "FW: x",
    "2026-03-02",
    "T09:30",
    "09:30",
    "오전 9시 30분",
    "3월 2일",
    "Mar 2, 2026",
    "ticket #",
    "접수번호",
    "12345",
    "[#",
    "]",
    "INC0012345",
    "https://",
    "x/y",
    "www.",
    "…",
    "<",
    "-",
    ".",
    ":",
    "2",
    "__",
]
MESS = st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from([" ", "\n", "", "\n\n"])), max_size=14).map(
    lambda parts: "".join(piece + gap for piece, gap in parts)
)


@given(MESS, st.sets(st.sampled_from(ALL)))
def test_a_second_pass_changes_nothing_and_text_stays_canonical(text: str, used: set[Canonicaliser]) -> None:
    once = scored_text(text, used)
    assert scored_text(once, used) == once
    assert canonical(once) == once
    assert bool(once) == bool(canonical(text))


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=12), st.lists(st.sampled_from(" \n"), min_size=12))
def test_words_and_plain_numbers_never_go(words: list[str], gaps: list[str]) -> None:
    text = "".join(word + gap for word, gap in zip(words, gaps, strict=False))
    assume(redacted(" ".join(words)) == " ".join(words))  # `302 302 5000` has the form of a telephone number
    assert scored_text(text, ALL) == " ".join(words)


@given(MESS)
def test_without_any_the_text_is_the_canonical_one(text: str) -> None:
    assert scored_text(text, ()) == canonical(text)


@pytest.mark.parametrize(("one", "other"), [("단수", "복구"), ("charged", "not charged"), ("미납", "납부")])
def test_opposites_never_share_a_key(one: str, other: str) -> None:
    prints = {"rule_set": "d", "model": "m", "tokenizer": "t", "prompt": "p", "category_set": "c", "normaliser": "1"}
    key = ScoreKey(b"s", label_token_ids=(1, 2), **prints)
    for size in range(len(ALL) + 1):
        for used in combinations(ALL, size):
            texts = [f"Re: [#12345] {word}\n\n{GMAIL}\n> {one} {other}\n-- \nAnn" for word in (one, other)]
            assert len({key(None, scored_text(text, used)) for text in texts}) == 2


def test_a_repeat_shares_its_key() -> None:
    first = "Re: [#12345] still no water since 2026-03-02 09:30"
    again = f"Re: [#67890] still no water since 2026-03-04 17:05\n\n{GMAIL}\n> {first}\n\nSent from my iPhone"
    assert scored_text(first, ALL) == scored_text(again, ALL)


@pytest.mark.parametrize(
    "unit",
    [
        "On 2026 9:00 x\n",
        "On 2026 9:00 wrote:\n>\n",
        "From: a\n",
        "2026-03-",
        "2026-03-02T09:30:00.123456789+09:00 ",
        "ticket #",
        "접수번호 ",
        "ticket number ",
        "https://",
        "www.",
        "mon, mar ",
        "오전 9시 ",
        "-- \n",
        "--\na@",
        "-",
        "_",
        "1",
        "[ #1",
        "INC",
        "sent from my galaxy ",
        "\n",
        "##-",
    ],
)
def test_a_long_text_takes_time_in_proportion(unit: str) -> None:
    """200 kB that tempts a pattern to try again and again; quadratic time would be minutes."""
    text = "x" + unit * (200_000 // len(unit))
    started = time.process_time()
    scored_text(text, ALL)
    assert time.process_time() - started < 5.0


def test_what_is_used_and_its_version_are_in_the_fingerprint_and_nothing_where_none_is() -> None:
    assert normaliser(()) == NORMALISER_VERSION
    assert normaliser(("urls", "quoted_replies")) == f"{NORMALISER_VERSION}+quoted_replies/2+urls/1"
    assert normaliser(("urls", "quoted_replies")) == normaliser(("quoted_replies", "urls"))


def test_a_rule_set_that_uses_some_has_another_fingerprint_and_the_same_categories() -> None:
    rules = rule_set()
    style = rules.categories.prompt.model_copy(update={"canonicalise": ("urls",)})
    categories = rules.categories.model_copy(update={"prompt": style})
    assert RuleSet(categories=categories, rules=rules.rules).fingerprint != rules.fingerprint
    assert categories.fingerprint == rules.categories.fingerprint


def test_overrides_and_people_see_the_whole_ticket_and_the_model_what_is_left() -> None:
    body = f"Not charged.\n\n{GMAIL}\n> phishing"
    value = orjson.dumps({"subject": "Re: [#12345]", "body": body})
    ticket = parse_ticket(value, Intake(), 10_000, ALL)
    assert "phishing" in ticket.text
    assert ticket.scored_text == "Re: [ #…] Not charged."
    assert parse_ticket(value, Intake(), 10_000).scored_text == ticket.text


def test_line_breaks_of_html_are_lines() -> None:
    quoted = f"<div>{GMAIL.replace('<', '&lt;')}</div><blockquote>You were charged.</blockquote>"
    html = f"<p>I was not charged at all.</p>{quoted}"
    value = orjson.dumps({"text": html})
    ticket = parse_ticket(value, Intake(markup="html"), 10_000, ("quoted_replies",))
    assert ticket.scored_text == "I was not charged at all."
