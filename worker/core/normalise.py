"""Canonical ticket text: alone knows which characters never reach a prompt and how control tokens are made harmless."""

from __future__ import annotations

import re
import unicodedata

NORMALISER_VERSION = "1"
"""Enters the fingerprints: changes whenever `canonical` may give another text for an ordinary ticket. One that spells
a control token met only now is none: its text, the key of its scores, changes without a new version."""

_INVISIBLE = (
    "\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f"  # controls that are no white space
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
"""Unicode's Default_Ignorable_Code_Point (bidi, zero width, tags, variation selectors, fillers), controls, and the
interlinear annotation marks. Written out, because a character's category may change with the Unicode version."""

_BRAILLE_BLANK = "\u2800"  # looks like white space and is none to `str.split`
_OPENERS = "<＜﹤|｜\\[［﹇"
"""Every special token of the tokenizers checked (Gemma 3, Qwen 3, Llama 2, Llama 3, DeepSeek V3, V4, gpt-oss, Mistral,
EXAONE 4.0 but for those below) has one of these before a character of its own: `<bos>`, `<|im_end|>`, `<｜User｜>`,
`｜DSML｜`, `[INST]`. Lookalikes are those that NFKC turns into an opener, because some tokenizers normalise so before
they look for special tokens."""

_PLAIN_WORDS = r"PI:(?=URL|EMAIL|ACCOUNT_NUM|PHONE_NUM|BUSINESS_NUM|ANNON|KEY|ID|IP_ADDRESS|USER)"
"""EXAONE 4.0 has control tokens that begin like any word; it finds them inside words too (`API:KEY`)."""

_ASCII_NOTABLE = ("<", "|", "[", "PI:")
"""What of the openers and plain words is ASCII."""

_REMOVED = re.compile(f"[{_INVISIBLE}]+")
_NOTABLE = re.compile(f"[{_INVISIBLE}{_OPENERS}{_BRAILLE_BLANK}]|PI:")
_MARKER = re.compile(rf"[<＜﹤|｜](?=[^ ])|[\[［﹇](?=[^ 0-9가-힣])|{_PLAIN_WORDS}")
"""Square brackets keep `[공지]` and `[1]`, which subjects are full of and no token begins with."""
_LONG_RUN = re.compile(r"[^\w\x00-\u02ff]{32}(?=[^\w\x00-\u02ff])")
"""Holds every run of more than 32 combining marks, none of which is a word character or below U+0300."""


def canonical(text: str) -> str:
    """The text that is scored and keyed; `canonical(canonical(x)) == canonical(x)`.

    Invisible characters are removed, NFC applied, white space collapsed to single spaces and trimmed; then a space is
    set behind each character that could open a special token (`<bos>` becomes `< bos>`), so that none can appear,
    provided that white space or a whole special token follows the text in the prompt.

    What is lost: joiners (an emoji family falls into its members; Persian and Indic joining hints), variation
    selectors, line breaks. What is not undone: words that look like a turn ("System:"), which are text like any other.
    Lone surrogates pass through.
    """
    if not _is_one_line(text):
        text = " ".join(text.split())
    if text.isascii() and text.isprintable() and not any(map(text.__contains__, _ASCII_NOTABLE)):
        return text  # as all that follows would, at a fifth of its cost
    notable = _NOTABLE.search(text)
    if notable:
        text = " ".join(_REMOVED.sub("", text).replace(_BRAILLE_BLANK, " ").split())
    if not unicodedata.is_normalized("NFC", text):
        # CPython sorts a run of combining marks in quadratic time (3.11: 64,000 marks take 3 s): break long runs first.
        text = unicodedata.normalize("NFC", _LONG_RUN.sub(r"\g<0> ", text))
    return _MARKER.sub(_spaced, text) if notable else text


def _is_one_line(text: str) -> bool:
    """Of printable characters, with single spaces between words: printable white space is a space."""
    return text.isprintable() and "  " not in text and not text.startswith(" ") and not text.endswith(" ")


def _spaced(marker: re.Match[str]) -> str:
    return marker[0] + " "  # as a template it takes CPython 3.11 three times as long: 0.25 s for 490,000 markers
