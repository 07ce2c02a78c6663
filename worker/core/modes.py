"""Modes: how much of a decision is carried out: none in shadow, a suggestion in assist, all of it in auto.

A mode changes where a ticket goes and what people are shown, never how it is scored or decided: calibrations and
certificates stay what they are, and what auto would do is decided and recorded in every mode.
"""

from __future__ import annotations

from typing import Literal, get_args

Mode = Literal["shadow", "assist", "auto"]
MODES: tuple[Mode, ...] = get_args(Mode)
"""From the strictest on."""


def stricter(one: Mode, other: Mode) -> Mode:
    """The one that carries out less."""
    return min(one, other, key=MODES.index)
