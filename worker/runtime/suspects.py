"""Suspects: which requests were in a call that ended the connection, and how large a call they may be in next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from worker.core.scores import ScoreRequest

ALONE = 0
"""In a call of its own, with no other call at the engine meanwhile."""
REMEMBERED = 16_384
"""Requests; as numbers, since a ticket that ended an engine may be large."""
SHRUNK = 8
"""A call that an engine did not outlive comes back in so many parts: a death costs a restart, a call next to nothing,
and 32 tickets are down to one after two more deaths instead of five."""


class Suspects:
    """What the batcher learnt of a request outlives the outage that the request may have caused: else the same tickets
    would meet again in the same batch, and end the engine again, for ever."""

    def __init__(self) -> None:
        self._most: dict[int, int] = {}

    def most(self, request: ScoreRequest) -> int | None:
        """Items in a call with this request, ALONE, or None where nothing is held against it."""
        return self._most.get(_number(request)) if self._most else None

    def dropped(self, batch: Sequence[ScoreRequest]) -> None:
        """A call with these got no answer: it may be any of them, or a call beside it."""
        self._suspect(batch, ALONE if len(batch) == 1 else (len(batch) + 1) // 2)

    def silent(self, batch: Sequence[ScoreRequest], *, hung: bool = False) -> None:
        """A call with these was not answered in time. Next time each goes by itself: waiting once more for whichever of
        them it is would take the others' whole time. `hung`: nothing beside them was answered either, so that one which
        was by itself goes with nothing beside it."""
        if len(batch) > 1:
            self._suspect(batch, 1)
        elif hung:
            self._suspect(batch, ALONE)

    def outlived(self, batch: Sequence[ScoreRequest]) -> None:
        """The engine was away when these were asked about: those of them that were dropped before may be why."""
        for request in batch:
            most = self.most(request)
            if most is not None and most > 1:
                # `dropped` has halved it already.
                self._suspect([request], max(1, 2 * most // SHRUNK))

    def cleared(self, batch: Iterable[ScoreRequest]) -> None:
        """These were answered."""
        if self._most:
            for request in batch:
                self._most.pop(_number(request), None)

    def _suspect(self, batch: Iterable[ScoreRequest], most: int) -> None:
        for request in batch:
            self._most.pop(_number(request), None)
            self._most[_number(request)] = most
        while len(self._most) > REMEMBERED:
            del self._most[next(iter(self._most))]


def _number(request: ScoreRequest) -> int:
    """Of the whole request, whose own hash is that of its item: another question about a ticket is another suspect."""
    return hash((request.prefix, request.item, request.label_token_ids))
