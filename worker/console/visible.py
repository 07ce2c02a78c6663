"""What of a text a terminal would obey, and how it is shown instead: `\\u001b`, as JSON writes it.

Ids, texts and labels come from files and topics that strangers write to. Rich 15 takes five control characters out of
them and lets escape sequences through: one could retitle the window, clear the screen, or write over what was said.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

# C0 but for tab and newline, DEL, C1; line and paragraph separators; what turns the direction of writing, by which a
# text may show as another; and halves of surrogate pairs, which no stream takes.
_OBEYED: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """The same text with every such character as `\\uXXXX`, which JSON and YAML strings read back; a CRLF is an LF."""
    if not _OBEYED.search(text):
        return text
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text.replace("\r\n", "\n"))


class VisibleConsole(Console):
    """A Console on which nothing that is printed is obeyed; Rich's own colours and bars are."""

    def render_str(self, text: str, **more: Any) -> Text:
        """Every string goes through here, in tables too, before its width is taken."""
        return super().render_str(visible(text), **more)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The last gate, for a Text that somebody made elsewhere: its layout is done, so nothing is put in place."""
        for segment in super().render(renderable, options):
            if segment.control is None and _OBEYED.search(segment.text):
                yield Segment(_OBEYED.sub("", segment.text), segment.style)
            else:
                yield segment
