"""Labels: the single tokens that stand for the categories, chosen and checked behind the real prompt ending."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from worker.core.categories import CategorySet
from worker.core.digest import fingerprint
from worker.core.prompt import Prompt, build_prompt
from worker.core.turns import Tokenize as Tokenize  # noqa: PLC0414 - labels are asked for with it
from worker.core.turns import fit_turns
from worker.errors import LabelError

FULL_CHECK_CHARS = 2_000_000
"""While all labels together need no more text than this, each is checked behind the whole prompt. Beyond, each is
checked behind the prompt's ending, and some behind the whole prompt, which must give the same tokens."""
CHECKED_BEHIND_THE_WHOLE = 16


@dataclass(frozen=True, slots=True)
class Labels:
    """Label words and their token ids, in category order."""

    words: tuple[str, ...]
    token_ids: tuple[int, ...]

    @property
    def fingerprint(self) -> str:
        return fingerprint("labels/1", self.words, self.token_ids)


async def choose_labels(categories: CategorySet, tokenize: Tokenize) -> tuple[Prompt, Labels]:
    """The prompt and its labels: words where all are distinct single tokens, letters and the like otherwise.

    Words are the `label` of each category or else its id. Where any category states its label, failing is an error
    (the prompt was written for those words); where none does, `allocate_words` finds others, and a legend says what
    they stand for. Raises LabelError, PromptError.
    """
    categories = await fit_to_tokenizer(categories, tokenize)
    words: Sequence[str] = [category.label or category.id for category in categories.categories]
    prompt = build_prompt(categories, words, legend=False)
    try:
        return prompt, await check_labels(prompt, words, tokenize)
    except LabelError:
        if any(category.label for category in categories.categories):
            raise
    words = await allocate_words(prompt, len(words), tokenize)
    prompt = build_prompt(categories, words, legend=True)
    return prompt, await check_labels(prompt, words, tokenize)


async def fit_to_tokenizer(categories: CategorySet, tokenize: Tokenize) -> CategorySet:
    """The set with the chat turns that this tokenizer needs. Raises PromptError where they are another model's."""
    style = categories.prompt
    if style.style != "chat":
        return categories
    turns = await fit_turns(style.chat_turns, tokenize)
    return categories.model_copy(update={"prompt": style.model_copy(update={"turns": turns})})


async def check_labels(prompt: Prompt, words: Sequence[str], tokenize: Tokenize) -> Labels:
    """Adds each label to a full prompt and demands exactly one more token, all of them different. Raises LabelError.

    One call of `tokenize`.
    """
    whole = prompt.prefix + prompt.item("x")
    if len(whole) * (len(words) + 1) <= FULL_CHECK_CHARS:
        ending, sample = whole, []
    else:
        ending, sample = prompt.item("x"), list(words[:: -(-len(words) // CHECKED_BEHIND_THE_WHOLE)])
    texts = [ending, *(f"{ending} {word}" for word in words)]
    rows = await tokenize([*texts, *([whole, *(f"{whole} {word}" for word in sample)] if sample else [])])
    found = _added(rows[0], rows[1 : len(texts)])
    many = [
        f"{word} ({len(ids) - len(rows[0])} tokens)"
        for word, ids, token in zip(words, rows[1:], found, strict=False)
        if token is None
    ]
    if many:
        raise LabelError("not a single token behind the prompt", many)
    if sample:
        by_word = dict(zip(words, found, strict=True))
        behind_whole = _added(rows[len(texts)], rows[len(texts) + 1 :])
        if moved := [word for word, token in zip(sample, behind_whole, strict=True) if token != by_word[word]]:
            raise LabelError("not the same token behind the whole prompt as behind its ending", moved)
    by_id: dict[int, str] = {}
    token_ids = []
    for word, token in zip(words, found, strict=True):
        if token is None:
            continue
        if token in by_id:
            raise LabelError("the same token", [by_id[token], word])
        by_id[token] = word
        token_ids.append(token)
    return Labels(tuple(words), tuple(token_ids))


async def allocate_words(prompt: Prompt, count: int, tokenize: Tokenize) -> list[str]:
    """`count` words that are distinct single tokens behind this prompt's ending, the same ones every time.

    From the first alphabet that holds enough of them, else from all alphabets one after the other. One call of
    `tokenize` for up to 26, two for more. Raises LabelError with what each alphabet holds.
    """
    ending = prompt.item("x")
    held = await _single_tokens(ending, {LETTERS: ALPHABETS[LETTERS]}, tokenize)
    if count > len(held[LETTERS]):
        held = await _single_tokens(ending, ALPHABETS, tokenize)
    for words in (*held.values(), list(itertools.chain.from_iterable(held.values()))):
        if len(words) >= count:
            return words[:count]
    counts = [f"{name}: {len(words)}" for name, words in held.items() if words]
    raise LabelError(
        f"{count} categories, and {sum(map(len, held.values()))} labels are single tokens behind this prompt; "
        "have fewer categories, ask in two levels, or state a label for each",
        counts or ["not even letters"],
    )


async def _single_tokens(
    ending: str, alphabets: Mapping[str, Sequence[str]], tokenize: Tokenize
) -> dict[str, list[str]]:
    """The words of each alphabet that are one token behind `ending`; of two with the same token, the first."""
    words = [word for alphabet in alphabets.values() for word in alphabet]
    bare, *extended = await tokenize([ending, *(f"{ending} {word}" for word in words)])
    token = dict(zip(words, _added(bare, extended), strict=True))
    taken: set[int] = set()
    held: dict[str, list[str]] = {}
    for name, alphabet in alphabets.items():
        held[name] = []
        for word in alphabet:
            added = token[word]
            if added is not None and added not in taken:
                taken.add(added)
                held[name].append(word)
    return held


def _added(bare: Sequence[int], extended: Iterable[Sequence[int]]) -> list[int | None]:
    """The one token that each has more than `bare`, or None where it is not one or the others changed."""
    size = len(bare)
    return [ids[-1] if len(ids) == size + 1 and ids[:size] == bare else None for ids in extended]


def _pairs(first: str, second: str) -> list[str]:
    return [one + two for one in first for two in second]


def _syllables() -> list[str]:
    """Hangul: the 399 open syllables, then those closed by the seven finals of standard pronunciation."""
    finals = (0, 1, 4, 7, 8, 16, 17, 21)  # none, then g, n, d, l, m, b, ng, by their places in Unicode 3.12
    return [chr(0xAC00 + 28 * body + final) for final in finals for body in range(19 * 21)]


LETTERS = "letters"
_UPPER, _LOWER = string.ascii_uppercase, string.ascii_lowercase
ALPHABETS: Mapping[str, Sequence[str]] = {
    LETTERS: list(_UPPER),
    "numbers": [str(number) for number in range(1, 1000)],
    "letter pairs": _pairs(_UPPER, _UPPER),
    "Hangul syllables": _syllables(),
    "small letters": [*_LOWER, *_pairs(_LOWER, _LOWER)],
    "capital and small letter": _pairs(_UPPER, _LOWER),
    "Greek": [chr(code) for code in range(0x391, 0x3CA) if chr(code).isalpha()],
    "Cyrillic": [chr(code) for code in range(0x410, 0x450)],
    "kana": [chr(code) for code in (*range(0x3041, 0x3097), *range(0x30A1, 0x30FB))],
}
"""In the order in which they are tried. Behind a space, numbers are two tokens for Gemma 3, Qwen 3, Llama 3, DeepSeek
V3 and gpt-oss, so pairs of letters follow."""
