"""Rationed: which of many lines that say the same are written, and for how many each of them stands."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Kept(Generic[T]):
    """What came of one kind since a line was written about it."""

    until: float
    """No line before."""
    last: T
    count: int = 0


class Rationed(Generic[T]):
    """The first of a kind is told at once. Those that follow are counted, and the last is told for them once `every_s`
    have passed; after as long with none the next is a first again. Kinds have to be few."""

    def __init__(self, clock: Callable[[], float], every_s: float) -> None:
        self._clock = clock
        self._every_s = every_s
        self._kinds: dict[Hashable, _Kept[T]] = {}

    def is_first(self, kind: Hashable, what: T) -> bool:
        """Whether to tell it now; else it is kept for `due`."""
        kept = self._kinds.get(kind)
        if kept is None:
            self._kinds[kind] = _Kept(self._clock() + self._every_s, what)
            return True
        kept.count += 1
        kept.last = what
        return False

    def due(self, *, all_of_it: bool = False) -> Iterator[tuple[T, int]]:
        """What is to be told by now, and for how many; `all_of_it` where nobody will ask again."""
        if not self._kinds:
            return
        now = self._clock()
        for kind, kept in list(self._kinds.items()):
            if now < kept.until and not all_of_it:
                continue
            if not kept.count:
                del self._kinds[kind]
                continue
            count, kept.count, kept.until = kept.count, 0, now + self._every_s
            yield kept.last, count
