"""TenantQuota: how much text each tenant may have read a minute, so that none takes the engine from the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

WINDOW_S = 60.0
MOST_TENANTS = 10_000
"""Those heard of last are remembered; one that was forgotten begins with a full allowance."""


class TenantQuota:
    """A token bucket for each tenant that holds a minute's worth of characters. One without a tenant is a tenant too.

    Each process counts for itself.
    """

    def __init__(self, characters: int, clock: Callable[[], float]) -> None:
        self.characters = characters
        self._clock = clock
        self._left: OrderedDict[str | None, tuple[float, float]] = OrderedDict()

    def admits(self, tenant: str | None, characters: int) -> bool:
        """Whether there is allowance left; what is admitted is taken from it, below zero by the last ticket at most."""
        now = self._clock()
        left, since = self._left.pop(tenant, (float(self.characters), now))
        left = min(float(self.characters), left + (now - since) * self.characters / WINDOW_S)
        admitted = left > 0
        self._left[tenant] = (left - characters if admitted else left, now)
        while len(self._left) > MOST_TENANTS:
            self._left.popitem(last=False)
        return admitted
