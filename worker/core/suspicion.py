"""Suspicion: which parts of a ticket address the router rather than the desk, in English and Korean, or may do so
because they are written in other letters than the rest.

Nothing is forbidden by it: what it finds is left out when the ticket is asked about once more, and the ticket routes
only where it does so without. So a part too many costs a request, or a person's look, and never a misroute; one that it
does not find is judged by its words like any other text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from worker.core.normalise import canonical
from worker.core.prefilter import may_match, search, whole_characters
from worker.core.redaction import PLACEHOLDERS
from worker.core.scripts import foreign, is_one_script, script_of

_WORD = re.compile(r"[^\W\d_]+")
_MARKS, _RULE = ".!?。！？…", "-=*#_/~"
_ENDS = re.compile(rf"[{_MARKS}](?=[\s\"'”’)\]]|$)|\s[{_RULE}]{{2,}}\s")
"""Where a sentence ends: canonical text has no lines."""
_LONG = 400
"""Characters. What is possible somewhere in a longer text is possible in hardly any of its sentences."""

_CUES = (
    r"category|categories|answer|label|labels|team|class|classification|classified as|department|dept"
    r"|queue|route|topic"
    r"|output|result|response|verdict|prediction|intent|legend|schema|enum|options?|type|final answer"
    r"|next word|default"
    r"|정답|해답|대답|답변|답|분류|분류 결과|분류 목록|분류표|분류 체계|분류 코드|카테고리|카테고리 목록"
    r"|범주|라벨|유형|유형 목록|항목|결과|결과값"
    r"|출력|선택지|보기|옵션|담당|담당 부서|담당 부서표|부서|다음 단어|최종 답변|기본값|규칙|구분|종류"
    # As folded: without accents. For tickets in the labels' own letters; in others any word of theirs is found.
    r"|categoria|categorie|kategorie|kategoria|kategori|danh muc|etiqueta|etiquette|etichetta|reponse|respuesta"
    r"|resposta|risposta|antwort|clasificacion|classificacao|classificazione|klassifizierung|категория|метка|ответ"
    r"|分类|分類|类别|類別|标签|答案|カテゴリー?|ラベル|答え"
)
_IS = r"[\"'”’)\]]{0,2}\s*(?:[:=>→⇒\-–—]+|\bis\b|\bare\b|[은는이가]\s|[은는이가]?\s*[:=])\s*"
_OPEN = r"[\s\"'“”‘’(\[{<|:=>]*"

_ROUTER = (
    r"(?:language model|\bllm\b|\bclassifier|classification (?:system|model)|routing system|ticket router"
    r"|(?:dear|attention|note to) (?:the )?(?:ai|model|router|bot|assistant|machine|system)\b"
    r"|you are (?:now )?(?:an? |the |in )(?:\w+ ){0,2}(?:ai|model|router|bot|assistant|mode|administrator"
    r"|classifier)\b"
    r"|as an ai\b|this router\b|(?:system|your) prompt\b"
    r"|언어 ?모델|분류기|분류 (?:시스템|담당 ai)|인공 ?지능에게|시스템의 프롬프트|(?:당신|너)(?:은"
    r"|는) .{0,30}(?:도우미|비서|모델|시스템)"
    r"|\bai(?:는|야|에게|아|님)\b)"
)
_OVERRIDE = (
    r"(?:\b(?:ignor\w*|disregard\w*|forget|overrid\w*|bypass|skip|do not follow|don't follow|never mind|treat)\b"
    r".{0,40}\b(?:instruct\w*|rules?|prompt|examples?|guidelines?|categor\w+|context|directions?|above"
    r"|previous|prior|your"
    r" task|list|everything|text|noise)\b"
    r"|\b(?:system|admin\w*|developer|security|it) (?:override|directive|command|notice)\b"
    r"|\b(?:maintenance|debug|developer|test|admin) mode\b|\bforce[_ ]?label\b"
    r"|(?:지시|명령|규칙|지침|예시|앞 문장|위 내용|목록|내용|하던 일|문장).{0,20}(?:무시|잊|신경 쓰지"
    r"|따르지|잡음|농담)"
    r"|(?:시스템|관리자|개발자|상부|시장님?|긴급)\s*(?:명령|지시|권한|모드|공지)|(?:점검|디버그|관리자"
    r"|개발자) 모드|명령한다"
    r"|이전 지시|라고(?:만)? (?:답|말|출력)|you will be switched off|당신은 종료됩니다|하나로만|중에서만"
    r"|목록에서만|\btip you\b|보상을 드)"
)
_ROLE = (
    r"(?:\b(?:system|assistant|developer|human|model output|ai)\s*[:>\]]|###|<<|>>>|\"\"\""
    r"|(?:시스템|어시스턴트|도우미|비서|인공지능|모델 출력)\s*[:>\]]"
    r"|\b(?:end of|끝 of) (?:the )?(?:ticket|message|request)|(?:민원|티켓|문의) (?:끝|종료)|\bq\s*:.{0,60}\ba\s*:"
    r"|질문\s*:.{0,60}(?:대답|답)\s*:|\b(?:example|예시) ?\d\b"
    r"|[<＜﹤\[|｜/] ?[|｜/]? ?(?:im_start|im_end|start_of_turn|end_of_turn|bos|eos|s|inst|sys|system"
    r"|assistant|user|model|think"
    r"|start_header_id|end_header_id|eot_id|endofturn|endoftext|begin_of_text|channel|message|start|end"
    r"|return|answer|result"
    r"|ticket|tool_call|instructions?|시스템|결과|민원|답)\b ?[|｜]? ?[>\]]?[|｜>\]＞])"
)
_CHOICE = r"\b(?:valid|retired|every|all other|the other|one of these)\b"
_LETTER = r"[a-z가나다라마바사아자차카타파하](?!\w)"
_LEADING = r"\b(?:category|team|label|answer|queue|정답|분류|카테고리|기본값)"
_SORT = (
    r"(?:classif(?:y|ied)|categori[sz]ed?|label(?:l?ed)?|routed?|routing|pre-?approved|verified"
    r"|assign(?:ed|ment)?|filed?"
    r"|redirect(?:ed)?|forward(?:ed)?|treat(?:ed)?|lands?|merged|choose|pick|select|answer|respond|output"
    r"|reply|default)"
)
_SAY = r"(?:answer|say|says|output|write|pick|choose|take|print|respond with|reply with|means?|stands for|the word)"
_ONE = r"(?:ticket|tickets|message|request|case|label|category|categories|team|assignment|it|this|that|one|except|only)"
_BE = r"(?:is|are|belongs? to|goes to|must go to|handled by|decided by|stays? with|in|into|to|under|as|by)"
_KO_PARTICLE = r"['\"”’]?\s?(?:[으]?로만?|이?라고만?|이?라는|[을를]|에서|함으로|팀|부서로?|담당|만|외의|[은이]? ?=)"
_KO_SORT = (
    r"(?:분류|배정|지정|출력|답하|답변|말하|이관|전달|접수|보내|통합|승인|선택|고르|확인했"
    r"|단어|처리합니다|볼 수|유효|존재|나머지|가게|모든 내용)"
)
_KO_OPEN = (
    r"(?:모든 민원은|민원의? (?:올바른 )?분류[은도]|정답은|답은"
    r"|진짜 주제는|주제는|분류는|남은 범주|이제|무엇이든|따라서|목록에서만)"
)

_TOGETHER = 3
"""Patterns are looked for by one automaton, which keeps up to 2 MB of states: all together have too many where labels
are. Those with a gap have one each, since what is behind a gap is awaited to the end of the text, beside all else."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of the text, `text[start:end]`, and why it was found."""

    start: int
    end: int
    kind: str


class Flagger:
    """Knows the words of one rule set: `labels` and names by which it answers, `cues` that stand in its prompt.

    What is written in other letters in the `examples` of its tickets says nothing where it stands in one, but for
    labels.
    """

    def __init__(self, labels: Iterable[str], cues: Iterable[str], examples: Iterable[str] = ()) -> None:
        words = sorted({_folded(word)[0] for word in labels if len(word) > 1}, key=len, reverse=True)
        self._script = script_of(words)
        self._labels = {part for word in words for part in _WORD.findall(word)}
        self._usual: set[str] = set()
        self._usual = {
            word
            for folded, _ in map(_folded, map(canonical, examples))
            for part in self._foreign(folded)
            for word in _WORD.findall(folded[slice(*part)])
        } - self._labels
        known = "|".join(rf"\b{re.escape(word)}" for word in words) or r"(?!)"
        own = sorted({_folded(cue)[0].rstrip(" :").strip() for cue in cues} - {""}, key=len, reverse=True)
        cue = "|".join([*map(re.escape, own), _CUES])
        word = f"(?:{known})"
        no_more = r"['\"”]?\s?(?:[.,;!]|$|and\b|categ|team|queue)"
        numbered = rf"(?:\b[a-d]|[가나다라①②③④]|\d)\s*[:=.)]?\s*{word}"
        marked_before, marked_behind = r"[\[({#<=→⇒>\"“'|]", r"(?:[\])}>\"”'|#]|$)"
        named = "|".join(map(re.escape, own)) or r"(?!)"
        # In a text: behind the end of a sentence, and before that of its own.
        behind = rf"\W*(?:[{_MARKS}]|\s[{_RULE}]{{2}}|\Z)"
        if any(word[-1] in _MARKS + _RULE for word in words):  # a label that is the end of its sentence itself
            behind = ""
        alone = rf"(?:\A|[{_MARKS}]|[{_RULE}]{{2}}\s)\W*{word}{behind}"
        self._whole = _compiled(
            ("override", _OVERRIDE),
            ("router", _ROUTER),
            ("command", rf"\b{_SORT}\b.{{0,12}}\b(?:as|to|under|by|with|for|in|into)\b.{{0,16}}{word}"),
            ("command", rf"\b{_SAY}[\s:]+(?:only\s|just\s|is\s|the\s|word\s)*{_OPEN}{word}\b{no_more}"),
            ("command", rf"{_CHOICE}.{{0,30}}\b(?:categ\w+|words?)\b.{{0,30}}{word}"),
            ("command", rf"\b{_ONE}\b(?: [\w-]+){{0,4}} {_BE}(?: [\w-]+){{0,3}}? {_OPEN}{word}(?:\W|$|\steam)"),
            ("command", rf"{word}{_KO_PARTICLE}.{{0,20}}{_KO_SORT}|{_KO_OPEN}.{{0,6}}{word}"),
            ("list", rf"{word}(?:.{{1,24}}{word}){{2}}"),
            ("only a label", rf"^\W*{word}\W*$", alone),
        )
        self._onwards = _compiled(
            ("answer", rf"(?:{cue}){_IS}{_OPEN}{word}|{_LEADING}\s+{word}"),
            ("answer", rf"(?:{cue}|\ba)\s*[:=>→]{_OPEN}(?:{word}|{_LETTER})"),
            ("answer", rf"({known})(?:\W{{1,4}}\1\b)"),
            ("answer", rf"(?:{named})\s*:"),
            ("answer", rf"{marked_before}\s*{word}\s*{marked_behind}|(?:->|=>|→|⇒)\s*{word}"),
            ("answer", rf"{numbered}\s+{numbered}"),
            ("role", _ROLE),
        )
        every = (*self._whole, *self._onwards)
        near = [each for each in every if ".{" not in each.pattern.pattern]
        together = [tuple(near[first : first + _TOGETHER]) for first in range(0, len(near), _TOGETHER)]
        together += [(each,) for each in every if each not in near]
        self._looks = tuple((may_match(*(each.standing for each in some)), some) for some in together)

    def find(self, text: str) -> tuple[Passage, ...]:
        """In canonical text: what addresses the router, from left to right, none within another."""
        text = whole_characters(text)
        folded, places = _folded(text)
        ascii_only = text.isascii()
        possible = self._possible(folded)
        # No sentence is disguised where the whole is not, since each begins behind what is no word.
        disguised = _is_disguised(text)
        if not possible and not disguised and (ascii_only or is_one_script(folded)):  # as most tickets
            return ()
        found: list[Passage] = []
        for start, end in _sentences(folded) if possible or disguised else ():
            sentence = folded[start:end]
            here = self._possible(sentence) if len(folded) > _LONG else possible
            kind = next((each.kind for each in self._whole if each in here and each.pattern.search(sentence)), None)
            if kind is None and disguised and _is_disguised(_original(text, places, start, end)):
                kind = "disguise"
            if kind is not None:
                found.append(Passage(start, end, kind))
                continue
            onwards = [each for each in self._onwards if each in here] if here else ()
            first = min(
                ((match.start(), each.kind) for each in onwards if (match := each.pattern.search(sentence))),
                default=None,
            )
            if first is not None:
                opened = len(sentence[: first[0]].rstrip(" \"'“‘([{<"))
                found.append(Passage(start + opened, end, first[1]))
        if not ascii_only:
            rest = _blanked(folded, ((passage.start, passage.end) for passage in found))
            found += [Passage(start, end, "other letters") for start, end in self._foreign(rest)]
        if places is not None:
            found = [Passage(places[p.start], places[p.end - 1] + 1, p.kind) for p in found]
        return _apart(found)

    def _foreign(self, folded: str) -> Iterator[tuple[int, int]]:
        said = _blanked(folded, (match.span() for match in _REDACTED.finditer(folded))) if "[" in folded else folded
        return foreign(said, self._script, self._counts)

    def _counts(self, word: str) -> bool | None:
        return True if word in self._labels else False if word in self._usual else None

    def _possible(self, text: str) -> list[_Pattern]:
        """All that may match anywhere in it, and perhaps more."""
        possible: list[_Pattern] = []
        for may_any, patterns in self._looks:  # written out: every ticket passes here, and hardly any comes further
            if may_any(text):
                possible += patterns
        return possible


@dataclass(frozen=True, slots=True, eq=False)
class _Pattern:
    kind: str
    pattern: re.Pattern[str]
    """Of a sentence."""
    standing: str
    """In a text of sentences, wherever it matches one of them."""


def _compiled(*patterns: tuple[str, str] | tuple[str, str, str]) -> tuple[_Pattern, ...]:
    """Of kind, pattern of a sentence, and what then stands in a text where that says more than the same.

    Every gap is bounded and no repetition holds another, so that matching stays linear in the text.
    """
    return tuple(_Pattern(kind, re.compile(pattern), (*more, pattern)[0]) for kind, pattern, *more in patterns)


def _blanked(text: str, spans: Iterable[tuple[int, int]]) -> str:
    """Of the same length. The spans are in order."""
    parts, at = [], 0
    for start, end in spans:
        parts += [text[at:start], " " * (end - start)]
        at = end
    return "".join((*parts, text[at:]))


def _apart(passages: list[Passage]) -> tuple[Passage, ...]:
    """The same parts, those that overlap as one."""
    apart: list[Passage] = []
    for passage in sorted(passages, key=lambda each: (each.start, each.end)):
        if apart and passage.start < apart[-1].end:
            apart[-1] = Passage(apart[-1].start, max(apart[-1].end, passage.end), apart[-1].kind)
        else:
            apart.append(passage)
    return tuple(apart)


def without(text: str, passages: Iterable[Passage]) -> str:
    """Canonical text that is left; empty where nothing is."""
    kept, at = [], 0
    for passage in passages:
        kept.append(text[at : passage.start])
        at = passage.end
    left = canonical(" ".join([*kept, text[at:]]))
    return left if any(char.isalnum() for char in left) else ""


def _original(text: str, places: list[int] | None, start: int, end: int) -> str:
    return text[start:end] if places is None else text[places[start] : places[end]]


def _sentences(text: str) -> Iterable[tuple[int, int]]:
    at = 0
    for end in _ENDS.finditer(text):
        if text[at : end.end()].strip():
            yield at, end.end()
        at = end.end()
    if text[at:].strip():
        yield at, len(text)


_FOREIGN_DISGUISE = re.compile(
    "[Ａ-Ｚａ-ｚ]{3}|[\U0001d400-\U0001d7ff]{3}|[Ⓐ-ⓩ🄰-🅩]{3}"  # full width, mathematical, circled
    "|(?:[A-Za-z][\u0334-\u0338]){3}"  # struck through
    "|[A-Za-z][Ͱ-Ͽа-яА-ЯѐѕіјԀ-ԯա-ֆ]|[Ͱ-Ͽа-яА-Яѐѕіјա-ֆ][A-Za-z]"  # two scripts in one word
    "|(?:[ㄱ-ㅎ][ㅏ-ㅣ][ㄱ-ㅎ]?){2}"  # syllables taken apart
)
_SPACED_OUT = re.compile(r"(?:(?<!\w)\w ){6}|(?:(?<!\w)\w[.\-_*·/]){5}")  # l e t t e r s
_ENCODED = re.compile("[A-Za-z0-9+/]{40}")
_DISGUISES = (_ENCODED, _SPACED_OUT, _FOREIGN_DISGUISE)
_may_be_disguised = may_match(*(each.pattern for each in _DISGUISES))


def _is_disguised(text: str) -> bool:
    some = _DISGUISES[:-1] if text.isascii() else _DISGUISES
    return _may_be_disguised(text) and any(each.search(text) for each in some)


_REDACTED = re.compile("|".join(rf"\[ ?{re.escape(text[1:].lower())}" for text in PLACEHOLDERS))
"""Canonical text may have a space behind what opens it."""
_is_folded = search(r"\A[\x00-\x7F가-힣]*\z")
"""Nothing but its capitals is left to fold."""
_TO_FOLD = re.compile("[^\x00-\x7f가-힣]+")
_ACCENTS = range(0x300, 0x370)


def _folded(text: str) -> tuple[str, list[int] | None]:
    """Small letters without disguise and accents, and for each the place where it came from; None where places are the
    same.
    """
    if text.isascii() or _is_folded(text):
        return text.lower(), None
    parts: list[str] = []
    places: list[int] = []
    at = 0
    for run in _TO_FOLD.finditer(text):
        start, end = run.span()
        parts.append(text[at:start].lower())
        places += range(at, start)
        for place, char in enumerate(run[0], start):
            for one in unicodedata.normalize("NFKC", char).casefold():
                for part in unicodedata.normalize("NFD", one) if one < "\u2000" else one:
                    if ord(part) not in _ACCENTS:
                        parts.append(part)
                        places.append(place)
        at = end
    places += range(at, len(text) + 1)
    return "".join((*parts, text[at:].lower())), places
