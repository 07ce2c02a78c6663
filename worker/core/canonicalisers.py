"""Canonicalisers: what a rule set may leave out of a ticket before it is scored and keyed, and where each part ends.

Each leaves words alone: dates, numbers and addresses give way to `…`, personal ones to what they are
(core.redaction), and whole lines go only where mail programs mark them as a quotation or a signature, below more than
a few words. What nothing would be left of stays as it is, but for what is personal. A bounded number of passes over the
text, whatever the input: its author chooses it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Literal

from worker.core.normalise import NORMALISER_VERSION, canonical
from worker.core.redaction import KINDS, Kind, redacted

Canonicaliser = Literal["quoted_replies", "signatures", "urls", "timestamps", "ticket_numbers"] | Kind

VERSIONS: Final[Mapping[Canonicaliser, int]] = {
    "quoted_replies": 2,
    "signatures": 2,
    "email_addresses": 1,
    "resident_numbers": 1,
    "card_numbers": 1,
    "phone_numbers": 1,
    "urls": 1,
    "timestamps": 1,
    "ticket_numbers": 1,
}
"""In the order in which they are applied. A version enters the fingerprints: it changes whenever its canonicaliser may
give another text for an ordinary ticket."""

GAP: Final = "…"
LONGEST_MARK: Final = 500
"""Characters of a line that may open a quotation."""
SIGNATURE_LINES, SIGNATURE_CHARS = 12, 1_000
HEADER_LINES: Final = 6
MOST_PASSES: Final = 8
"""An ordinary ticket takes two. What an author stacks higher stays."""
LEAST_LEFT: Final = 20
"""Characters. Less than a sentence above a quotation or a signature may be about what stands there."""


def scored_text(text: str, canonicalisers: Collection[Canonicaliser]) -> str:
    """Of a ticket's text as it came, with its line breaks: what is scored and keyed, canonical.

    Idempotent, and with no canonicaliser `canonical(text)`.
    """
    for name, lines in _LINES.items():
        if name in canonicalisers:
            text = lines(text)
    personal = [kind for kind in KINDS if kind in canonicalisers]
    spans = [replace for name, replace in _SPANS.items() if name in canonicalisers]
    clean = _without_personal(canonical(text), personal)  # before the others, which might leave half of an address
    for _ in range(MOST_PASSES):
        left = clean
        for replace in spans:
            left = replace(left)
        if left == clean or not _WORD.search(left):
            break
        # What went may have hidden where a personal number begins: `10:30(415) 555-2671`. Canonical anew, since a gap
        # may stand where canonical text wants a space: `[2026-03-02]`.
        clean = _without_personal(canonical(left), personal)
    return clean


def _without_personal(clean: str, kinds: Collection[Kind]) -> str:
    return canonical(redacted(clean, kinds)) if kinds else clean  # anew, since `[PHONE]` opens like a token


def normaliser(canonicalisers: Collection[Canonicaliser]) -> str:
    """How text is made canonical, as the fingerprints state it."""
    used = (f"+{name}/{version}" for name, version in VERSIONS.items() if name in canonicalisers)
    return NORMALISER_VERSION + "".join(used)


_WORD = re.compile(r"[^\W_]")
_YEAR_OR_DATE = re.compile(r"(?:19|20)[0-9]{2}|[0-9]{1,2}[/.][0-9]{1,2}[/.][0-9]{2}")
_CLOCK = re.compile(r"[0-9]{1,2}:[0-9]{2}")
_WROTE = ("wrote:", "작성:", "작성함:", "님이 씀:")
_SEPARATOR = re.compile(
    r"-{2,} ?\[? ?(?:original message|original mail|원본 ?메시지|원본 ?메일|받은 ?메일 ?내용|이전 ?메시지) ?\]? ?-{2,}"
    r"|##-.*-##",  # Zendesk's line, above which people are asked to reply
    re.IGNORECASE,
)
_FORWARDED = re.compile(r"(?:fwd?|전달) ?:", re.IGNORECASE)
_HEADERS = (
    re.compile(r"(?:from|보낸 ?사람) ?:", re.IGNORECASE),
    re.compile(r"(?:sent|date|보낸 ?날짜|날짜) ?:", re.IGNORECASE),
    re.compile(r"(?:to|받는 ?사람) ?:", re.IGNORECASE),
    re.compile(r"(?:subject|제목) ?:", re.IGNORECASE),
)
"""The block that Outlook sets above what is answered; all four within a few lines."""


def _without_quoted_replies(text: str) -> str:
    """From the first line that opens an unmarked quotation all that follows goes; of a marked one (`>`) its lines.

    `>` by itself is no mark: people paste logs and prompts. A forwarded mail is what the ticket is about, so it stays.
    """
    lines = text.splitlines()
    first = next((line.strip() for line in lines if line.strip()), "")
    forwarded = _FORWARDED.match(first) is not None
    kept: list[str] = []
    marked, at = False, 0
    while at < len(lines):
        line = lines[at].strip()
        if marked and line.startswith(">"):
            at += 1
            continue
        if not forwarded and (_SEPARATOR.fullmatch(line[:LONGEST_MARK]) or _is_header_block(lines, at)):
            break
        taken = _introduces(lines, at)
        if not taken:
            kept.append(lines[at])
            at += 1
            continue
        at += taken
        while at < len(lines) and not lines[at].strip():
            at += 1
        if at == len(lines) or not lines[at].lstrip().startswith(">"):
            break
        marked = True
    while kept and not kept[-1].strip(" \t_"):  # Outlook's rule above the block
        kept.pop()
    return "\n".join(kept) if _is_enough(kept) else text


def _introduces(lines: Sequence[str], at: int) -> int:
    """How many lines say who wrote what follows, and when: 0, 1, or 2 where the mail program broke them."""
    line = lines[at].strip()
    if len(line) > LONGEST_MARK or not (line.startswith("On ") or line[:4].isdigit()):
        return 0
    if not (_CLOCK.search(line) and _YEAR_OR_DATE.search(line)):
        return 0
    if line.endswith(_WROTE):
        return 1
    following = lines[at + 1].strip() if at + 1 < len(lines) else ""
    return 2 if len(following) <= LONGEST_MARK and following.endswith(_WROTE) else 0


def _is_header_block(lines: Sequence[str], at: int) -> bool:
    if not _HEADERS[0].match(lines[at].strip()):
        return False
    block = [line.strip() for line in lines[at + 1 : at + 1 + HEADER_LINES]]
    return all(any(header.match(line) for line in block) for header in _HEADERS[1:])


_CONTACT = re.compile(r"[^\s@]@[^\s@]|https?://|www\.|[0-9][0-9 ().-]{6,20}[0-9]")
_DEVICE = re.compile(
    r"sent from (?:my )?(?:iphone|ipad|(?:android|samsung|galaxy|huawei|xiaomi)[a-z0-9 +]{0,30}|blackberry"
    r"|(?:mobile |cell ?)?phone|mobile(?: device)?|outlook[a-z ]{0,20}|mail for windows[0-9 ]{0,4}"
    r"|yahoo mail[a-z ]{0,20})\.?"
    r"|get outlook for [a-z]{2,10}(?: ?<[^<> ]{1,80}>)?"
    r"|(?:나의 |내 |my )?(?:iphone|아이폰|ipad|아이패드|(?:삼성|samsung) ?이메일|outlook[a-z ]{0,20}"
    r"|(?:삼성 |samsung )?(?:galaxy|갤럭시)[a-z0-9 +]{0,30}(?:스마트폰)?)에서 보(?:냄|냈습니다)\.?",
    re.IGNORECASE,
)
_LONGEST_DEVICE = 150


def _without_signature(text: str) -> str:
    """The lines under a `-- ` (RFC 3676, 4.3), and the line that a telephone adds.

    Where the space is gone the lines must name a way to reach somebody. Two such lines are taken for rules between
    paragraphs, and so is one that more follows than people sign with.
    """
    lines = _without_device(text.splitlines())
    delimiters = [number for number, line in enumerate(lines) if line.rstrip() == "--"]
    if len(delimiters) == 1:
        (at,) = delimiters
        below = [line for line in lines[at + 1 :] if line.strip()]
        fits = len(below) <= SIGNATURE_LINES and sum(map(len, below)) <= SIGNATURE_CHARS
        if fits and (lines[at][2:3] in (" ", "\xa0") or any(map(_CONTACT.search, below))):
            above = _without_device(lines[:at])
            lines = above if _is_enough(above) else lines
    return "\n".join(lines) if any(map(_WORD.search, lines)) else text


def _without_device(lines: list[str]) -> list[str]:
    end = len(lines)
    while end:
        line = lines[end - 1].strip()
        if line and not (len(line) <= _LONGEST_DEVICE and _DEVICE.fullmatch(line)):
            break
        end -= 1
    return lines[:end]


def _is_enough(lines: Sequence[str]) -> bool:
    return len("\n".join(lines).strip()) >= LEAST_LEFT and any(map(_WORD.search, lines))


# The patterns below read canonical text: single spaces, composed characters. Every repetition is bounded but the one of
# an address, which ends only with the match. A gap counts as part of a number beside it, so that a second pass finds
# nothing that the first did not.

_URL = re.compile(r"(?<![A-Za-z0-9])(?:https?://|www\.)[!-~]+", re.IGNORECASE)
_AROUND_URL = ".,;:!?'\"()[]{}<>"


def _without_urls(text: str) -> str:
    return _URL.sub(_gap_for_url, text) if "://" in text or "www." in text.lower() else text


def _gap_for_url(found: re.Match[str]) -> str:
    url = found[0]
    address = url.rstrip(_AROUND_URL)
    return url if address.lower() in ("http", "https", "www") else GAP + url[len(address) :]


_YEAR, _MONTH, _DAY = r"(?:19|20)[0-9]{2}", r"(?:0?[1-9]|1[0-2])", r"(?:0?[1-9]|[12][0-9]|3[01])"
_NAMED_MONTH = (
    r"(?:[Jj]an(?:uary)?|[Ff]eb(?:ruary)?|[Mm]ar(?:ch)?|[Aa]pr(?:il)?|[Mm]ay|[Jj]une?|[Jj]uly?|[Aa]ug(?:ust)?"
    r"|[Ss]ept?(?:ember)?|[Oo]ct(?:ober)?|[Nn]ov(?:ember)?|[Dd]ec(?:ember)?)\.?"
)
_NAMED_DAY = r"(?:(?:[Mm]on|[Tt]ues?|[Ww]ed(?:nes)?|[Tt]hu(?:rs?)?|[Ff]ri|[Ss]at(?:ur)?|[Ss]un)(?:day)?,? )?"
_KOREAN_DAY = r"(?: ?\([월화수목금토일]\)| [월화수목금토일]요일)?"
_TIME = (
    r"(?:[01]?[0-9]|2[0-3]):[0-5][0-9](?::[0-5][0-9](?:[.,][0-9]{1,9})?)?(?: ?[AaPp]\.?[Mm]\b\.?)?"
    r"(?: ?(?:[Zz]|UTC|GMT|KST)\b| ?[+-][0-2][0-9]:?[0-5][0-9])?"
)
_KOREAN_TIME = (
    r"(?:(?:오전|오후) ?[0-9]{1,2}(?::[0-5][0-9](?::[0-5][0-9])?|시(?!간)(?: ?[0-9]{1,2}분)?)"
    r"|[0-9]{1,2}시 ?[0-9]{1,2}분)(?: ?[0-9]{1,2}초)?"
)
_DATE = (
    rf"(?:{_NAMED_DAY}(?:{_NAMED_MONTH} {_DAY}(?:st|nd|rd|th)?,? {_YEAR}"
    rf"|{_DAY}(?:st|nd|rd|th)? {_NAMED_MONTH},? {_YEAR})"
    rf"|{_YEAR}-{_MONTH}-{_DAY}|{_YEAR}/{_MONTH}/{_DAY}|{_YEAR}\. ?{_MONTH}\. ?{_DAY}\.?{_KOREAN_DAY}"
    rf"|(?:{_YEAR}년 ?)?{_MONTH}월 ?{_DAY}일{_KOREAN_DAY}"
    rf"|{_DAY}/{_DAY}/{_YEAR}|{_DAY}\.{_DAY}\.{_YEAR})"
)
"""With a year, or with the Korean words for month and day: `May 2` may be people, and `3.2` a version."""
_TIMESTAMP = re.compile(
    rf"(?=[0-9JFMASONDTWjfmasondtw오])(?<![\w.:/+{GAP}-])"
    rf"(?:{_DATE}(?:(?:[Tt]|,? (?:at )?)(?:{_TIME}|{_KOREAN_TIME}))?|{_TIME}|{_KOREAN_TIME})"
    rf"(?![A-Za-z0-9:/{GAP}]|[.,-][0-9])"
)
_DIGIT = re.compile(r"[0-9]")


def _without_timestamps(text: str) -> str:
    return _TIMESTAMP.sub(GAP, text) if _DIGIT.search(text) else text


_NUMBER = r"(?:[A-Za-z]{1,6}-?)?[0-9][0-9-]{1,23}[0-9]"
_TICKET_NUMBER = re.compile(
    r"(?=[TCRIPStcrips티접문민사요\[])(?:((?<![^\W_])(?:[Tt]icket|TICKET|[Cc]ase|CASE|[Rr]equest|REQUEST|[Ii]ncident) ?"
    r"(?:(?:[Nn]umber|NUMBER|I[Dd]|id|[Nn]o\.|[Nn]o:|[Nn]o ?#) ?(?:is )?[:#]? ?|: ?# ?|# ?)"
    r"|(?:티켓|접수|문의|민원|사건|요청) ?(?:(?:번호|I[Dd]|[Nn]o\.)(?:는|은)? ?[:#]? ?|# ?)"
    rf"){_NUMBER}(?![A-Za-z0-9{GAP}-]|[.,][0-9]| ?[원만천억호층동])"
    r"|(\[ ?#)[0-9]{5,20}(?= ?\])"
    r"|(?<![A-Za-z0-9-])()(?:INC|RITM|REQ|CHG|PRB|SCTASK|CS)[0-9]{7,10}(?![A-Za-z0-9-]))"
)
"""Behind words that say what the number is, in a subject's tag (`[#12345]`), or in ServiceNow's own form. The words
stay. Never a bare number: it may be an amount, a room or an order."""


def _without_ticket_numbers(text: str) -> str:
    return _TICKET_NUMBER.sub(_gap_for_number, text) if _DIGIT.search(text) else text


def _gap_for_number(found: re.Match[str]) -> str:
    return (found[1] or found[2] or "") + GAP


_LINES: Final[Mapping[str, Callable[[str], str]]] = {
    "quoted_replies": _without_quoted_replies,
    "signatures": _without_signature,
}
_SPANS: Final[Mapping[str, Callable[[str], str]]] = {
    "urls": _without_urls,
    "timestamps": _without_timestamps,
    "ticket_numbers": _without_ticket_numbers,
}
