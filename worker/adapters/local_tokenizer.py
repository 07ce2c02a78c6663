"""How a model's own tokenizer.json is read with the `tokenizers` library, with its special tokens and without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worker.adapters.tokenizer_digest import PROBE_TEXTS
from worker.errors import ConfigError, RequestRefused

INSTALL = "pip install 'ticket-router[ids]'"
MOST_BYTES = 256 * 2**20
ROUNDS = 8
"""Breaking up one control token may let another show; more than two rounds were never seen."""


class TokenizerFile:
    """A LocalTokenizer on a file as Hugging Face writes it (checked on tokenizers 0.22).

    Control tokens are all that the file lists as added, but for those of white space alone: special ones, and those
    that a chat template uses without their being special (`<think>`, `<tool_call>`).
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError."""
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(f"ROUTER_TOKENIZER_FILE needs the tokenizers library: {INSTALL}") from error
        where = f"ROUTER_TOKENIZER_FILE {path}"
        try:
            if path.stat().st_size > MOST_BYTES:
                raise ConfigError(f"{where}: larger than {MOST_BYTES} bytes, so no tokenizer.json")
            document: dict[str, Any] = json.loads(path.read_bytes())
            # A file may cut and pad what it tokenizes: the end of a prompt is where the answer is asked for.
            document |= {"truncation": None, "padding": None}
            added = [entry for entry in document.get("added_tokens", []) if entry["content"].strip(" \t\n▁")]
            self._marked = Tokenizer.from_str(json.dumps(document))
            self._plain = Tokenizer.from_str(json.dumps(document | {"added_tokens": _white_space(document)}))
        except OSError as error:
            raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{where}: no tokenizer.json that this version of tokenizers reads ({error})") from error
        self._control = frozenset(int(entry["id"]) for entry in added)

    @property
    def probes(self) -> Sequence[str]:
        return PROBE_TEXTS

    def whole(self, text: str) -> tuple[int, ...]:
        return tuple(self._marked.encode(text).ids)

    def marked(self, text: str) -> tuple[int, ...]:
        return tuple(self._marked.encode(text, add_special_tokens=False).ids)

    def plain(self, text: str) -> tuple[int, ...]:
        ids = tuple(_utf8(text, self._plain).ids)
        if not self._control.isdisjoint(ids):  # where its vocabulary holds a control token among the words
            raise RequestRefused("the ticket's text becomes a control token of the model")
        return ids

    def harmless(self, text: str) -> str:
        for _ in range(ROUNDS):
            found = _utf8(f" {text}", self._marked)
            spans = [
                (start - 1, end - 1)
                for token, (start, end) in zip(found.ids, found.offsets, strict=True)
                if token in self._control
            ]
            if not spans:
                return text
            for start, end in reversed(spans):
                first = max(0, start)
                # A space behind its first character ends a spelling; one of a single character is left out.
                inside = text[first : first + 1] + " " + text[first + 1 : end] if end - first > 1 else " "
                text = text[:first] + inside + text[end:]
            text = " ".join(text.split())
        raise RequestRefused("the ticket's text spells control tokens of the model that cannot be broken up")


def _white_space(document: dict[str, Any]) -> list[Any]:
    """Added tokens that stand for runs of white space: ordinary text needs them."""
    return [entry for entry in document.get("added_tokens", []) if not entry["content"].strip(" \t\n▁")]


def _utf8(text: str, tokenizer: Any) -> Any:
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except (UnicodeEncodeError, TypeError) as error:
        raise RequestRefused("the text cannot be encoded as UTF-8") from error
