"""Sources: the few names under which metrics know where tickets come from; authors may fill in any."""

from __future__ import annotations

from worker.core.printable import printable

MOST = 50
OTHERS = "others"
MOST_CHARACTERS = 40


class Sources:
    """`tenant/channel` of the first fifty that are asked for; all else is `others`, for as long as this lives."""

    def __init__(self) -> None:
        self._known: dict[tuple[str | None, str | None], str] = {}

    def name(self, tenant: str | None, channel: str | None) -> str:
        source = (tenant, channel)
        if source not in self._known:
            if len(self._known) >= MOST:
                return OTHERS
            self._known[source] = f"{_shown(tenant)}/{_shown(channel)}"
        return self._known[source]


def _shown(value: str | None) -> str:
    """One printable line of bounded length."""
    if value is None:
        return "-"
    return printable(value[:MOST_CHARACTERS])
