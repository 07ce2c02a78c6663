"""Strangers' words for one line of a terminal, a log or a metric: nothing in them is obeyed, none turns the others."""

from __future__ import annotations


def printable(text: str, instead: str = "?") -> str:
    """The same with `instead` for each character that is not printable, which line ends and bidi controls are not."""
    return text if text.isprintable() else "".join(char if char.isprintable() else instead for char in text)
