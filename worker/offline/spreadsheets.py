"""What a spreadsheet would make of a CSV file's cells: those that begin like a formula are computed when it is opened.

Ids and texts are strangers' words, and a formula can send what stands beside it to an address. The files are read back
by `calibrate`, and what is scored must be what was sent: so cells are written as they are, and it is said.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")
"""OWASP, CSV Injection; a spreadsheet in Japanese or Korean takes the full-width signs too."""


def formula_note(cells: Iterable[str]) -> str | None:
    """One sentence where some of the cells would be taken for formulas, else None."""
    count = sum(cell.startswith(FORMULA_STARTS) for cell in cells)
    if not count:
        return None
    return (
        f"{count} cells begin with = + - or @ and open as formulas in a spreadsheet, which is how strangers get at its "
        "contents: import the columns as text there"
    )
