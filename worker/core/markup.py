"""Markup: what a reader sees of an HTML text; alone knows where tags, comments and hidden parts end.

In one pass, whatever the input: Python's own `html.parser` takes quadratic time on comments and tags that never end
(3.11.7: two minutes for 480 kB of `<!--`), and a ticket's author chooses the input.
"""

from __future__ import annotations

import html
import re

_NAME = re.compile(r"/?([a-zA-Z][^\s/>]*)")
_QUOTE_OR_END = re.compile(r"=\s*([\"'])|>")
"""A quote counts behind an equals sign only: `<p don't>` is a whole tag."""
_RAW = {name: re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE) for name in ("script", "style")}
"""Elements that hold no markup: only their own end tag ends them."""
_HIDDEN = frozenset({"head", "title", "template"})
_BREAKS = frozenset({"br", "p", "div", "blockquote", "tr", "li", "hr", "pre", "h1", "h2", "h3", "h4", "h5", "h6"})
_HUGE_REFERENCE = re.compile(r"&#(?:[0-9]{8,}|[xX][0-9a-fA-F]{8,});?")
"""No character has such a number, and `html.unescape` fails on more than 4,300 digits."""


def visible_text(markup: str) -> str:
    """The text with white space for each tag, a line break for one that ends a line.

    Never raises; what is opened and never closed stays as it is written, so that no word gets lost behind a `<`.
    """
    parts: list[str] = []
    at = hidden = 0
    while (opened := markup.find("<", at)) >= 0:
        if not hidden:
            parts.append(_text(markup[at:opened]))
        name = _NAME.match(markup, opened + 1)
        if name is None and markup[opened + 1 : opened + 2] not in ("!", "?", "/"):
            parts.append("" if hidden else "<")
            at = opened + 1
            continue
        closed = _end_of_tag(markup, opened, name)
        if closed < 0:
            at = opened
            break
        at = closed
        if name is None:
            continue
        tag, ends = name[1].lower(), name[0].startswith("/")
        parts.append("\n" if tag in _BREAKS else " ")
        if tag in _HIDDEN:
            hidden = max(0, hidden - 1) if ends else hidden + 1
        elif tag in _RAW and not ends:
            end = _RAW[tag].search(markup, at)
            at = len(markup) if end is None else end.start()
    if not hidden:
        parts.append(_text(markup[at:]))
    return "".join(parts)


def _end_of_tag(markup: str, opened: int, name: re.Match[str] | None) -> int:
    """Where what opens there is over; negative where it never is."""
    if markup.startswith("<!--", opened):
        end = markup.find("-->", opened + 2)  # `<!-->` is a whole comment
        return end + 3 if end >= 0 else -1
    if name is None:  # a declaration, an instruction, or nothing known: up to the next `>`
        return markup.find(">", opened) + 1 or -1
    at = name.end()
    while (found := _QUOTE_OR_END.search(markup, at)) is not None:
        if found[1] is None:
            return found.end()
        at = markup.find(found[1], found.end()) + 1
        if not at:
            return -1
    return -1


def _text(piece: str) -> str:
    return html.unescape(_HUGE_REFERENCE.sub("\ufffd", piece)) if "&" in piece else piece
