"""CacheBatch: one look-up for what comes together, and a bounded wait for what another worker scores."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from tests.runtime.virtual_time import in_virtual_time
from worker.adapters.memory import MemoryCache
from worker.core.scores import LabelScores
from worker.ports import Lease
from worker.runtime.cache_batch import CacheBatch, Waits

SCORES = LabelScores.from_logprobs((-0.2, -2.5))
WAITS = Waits(lease_s=1.0, longest_s=0.05, poll_s=0.001, vain_to_stop=3, stopped_s=0.2)


class Shared:
    """A shared cache in memory, with keys that another worker is scoring."""

    def __init__(self, *theirs: str) -> None:
        self.held: dict[str, LabelScores] = {}
        self.theirs = set(theirs)
        self.looks: list[list[str]] = []
        self.released: list[str] = []
        self.away = False

    async def get_or_lease(self, keys: Sequence[str], lease_s: float) -> Sequence[LabelScores | Lease | None]:
        self.looks.append(list(keys))
        if self.away:
            raise RuntimeError("a bug in the adapter")
        return [self.held.get(key, Lease.THEIRS if key in self.theirs else Lease.OURS) for key in keys]

    async def get_many(self, keys: Sequence[str]) -> Sequence[LabelScores | None]:
        raise AssertionError("leases are asked for with the look-up")

    async def put_many(self, items: Mapping[str, LabelScores], released: Sequence[str] = ()) -> None:
        self.held.update(items)
        self.released += released

    async def probe(self) -> str | None:
        return None

    async def aclose(self) -> None: ...


async def test_unique_tickets_take_one_look_up_together_and_never_wait() -> None:
    shared = Shared()
    batch = CacheBatch(shared, waits=WAITS)
    assert await asyncio.gather(*(batch.get(f"k{n}") for n in range(50))) == [None] * 50
    assert [len(look) for look in shared.looks] == [50]
    assert batch.counters == {"waits": 0, "answered": 0, "takeovers": 0, "in_vain": 0}


@in_virtual_time
async def test_equal_keys_are_looked_up_once_whenever_they_come() -> None:
    shared = Shared("k")
    batch = CacheBatch(shared, waits=Waits(poll_s=0.001))
    first = [asyncio.ensure_future(batch.get("k")) for _ in range(10)]
    while not batch.counters["waits"]:
        await asyncio.sleep(0)
    later = [asyncio.ensure_future(batch.get("k")) for _ in range(10)]
    await asyncio.sleep(0)
    shared.held["k"] = SCORES
    async with asyncio.timeout(10):
        assert set(await asyncio.gather(*first, *later)) == {SCORES}
    assert batch.counters == {"waits": 1, "answered": 1, "takeovers": 0, "in_vain": 0}


@in_virtual_time
async def test_who_asks_while_a_look_up_is_under_way_shares_it() -> None:
    class Slow(Shared):
        async def get_or_lease(self, keys: Sequence[str], lease_s: float) -> Sequence[LabelScores | Lease | None]:
            found = await super().get_or_lease(keys, lease_s)
            await asyncio.sleep(0.01)
            return found

    shared = Slow("k")
    batch = CacheBatch(shared, waits=Waits(poll_s=0.001))
    asked = []
    for _ in range(5):
        asked.append(asyncio.ensure_future(batch.get("k")))
        while len(asked) > len(shared.looks) and len(asked) == 1:
            await asyncio.sleep(0)
        await asyncio.sleep(0.001)
    shared.held["k"] = SCORES
    async with asyncio.timeout(10):
        assert await asyncio.gather(*asked) == [SCORES] * 5
    assert batch.counters["waits"] == 1


async def test_all_that_wait_are_asked_for_together() -> None:
    shared = Shared(*(f"k{n}" for n in range(20)))
    batch = CacheBatch(shared, waits=Waits(poll_s=0.001))
    waiting = [asyncio.ensure_future(batch.get(f"k{n}")) for n in range(20)]
    while len(shared.looks) < 3:
        await asyncio.sleep(0)
    assert {len(look) for look in shared.looks} == {20}
    shared.theirs.clear()
    async with asyncio.timeout(10):
        await asyncio.gather(*waiting)
    assert batch.counters["takeovers"] == 20


@in_virtual_time
async def test_a_wait_ends_and_the_ticket_is_scored_here() -> None:
    shared = Shared("k")
    batch = CacheBatch(shared, waits=WAITS)
    started = asyncio.get_running_loop().time()
    async with asyncio.timeout(10):
        assert await batch.get("k") is None
    assert asyncio.get_running_loop().time() - started >= WAITS.longest_s
    assert batch.counters["in_vain"] == 1


@in_virtual_time
async def test_waits_that_are_in_vain_again_and_again_are_given_up_for_a_while() -> None:
    shared = Shared(*(f"k{n}" for n in range(9)))
    batch = CacheBatch(shared, waits=WAITS)
    for n in range(WAITS.vain_to_stop):
        await batch.get(f"k{n}")
    looks = len(shared.looks)
    assert await batch.get("k7") is None
    assert len(shared.looks) == looks + 1, "no poll: it was not waited for"
    await asyncio.sleep(WAITS.stopped_s)
    await batch.get("k8")
    assert batch.counters["waits"] == WAITS.vain_to_stop + 1


class Fleeting(Shared):
    """Every key is another worker's; of some the lease is let go at the third look, and of some there are scores."""

    def __init__(self, *, let_go: Sequence[str] = (), scored: Sequence[str] = ()) -> None:
        super().__init__()
        self.let_go, self.scored = set(let_go), set(scored)

    async def get_or_lease(self, keys: Sequence[str], lease_s: float) -> Sequence[LabelScores | Lease | None]:
        self.looks.append(list(keys))
        return [self._answer(key) if self._looked(key) > 2 else Lease.THEIRS for key in keys]

    def _answer(self, key: str) -> LabelScores | Lease:
        return SCORES if key in self.scored else Lease.OURS if key in self.let_go else Lease.THEIRS

    def _looked(self, key: str) -> int:
        return sum(key in look for look in self.looks)


@pytest.mark.parametrize("every", [1, 2, 4, 15])
@in_virtual_time
async def test_leases_that_are_let_go_do_not_keep_tickets_waiting(every: int) -> None:
    keys = [f"k{n}" for n in range(40)]
    waits = replace(WAITS, stopped_s=3_600.0)
    batch = CacheBatch(Fleeting(let_go=keys[::every]), waits=waits)
    for key in keys:
        assert await batch.get(key) is None
    assert batch.counters["waits"] == waits.vain_to_stop


@in_virtual_time
async def test_waits_that_mostly_get_scores_go_on() -> None:
    keys = [f"k{n}" for n in range(40)]
    waits = replace(WAITS, longest_s=60.0, of_last=8, stopped_s=3_600.0)
    batch = CacheBatch(Fleeting(let_go=keys[::4], scored=[k for n, k in enumerate(keys) if n % 4]), waits=waits)
    for key in keys:
        await batch.get(key)
    assert batch.counters["waits"] == 40


@in_virtual_time
async def test_after_a_stop_one_waits_at_a_time_until_scores_come_again() -> None:
    keys = [f"k{n}" for n in range(40)]
    waits = replace(WAITS, longest_s=60.0, of_last=4, stopped_s=0.05)
    batch = CacheBatch(Fleeting(let_go=keys[:10], scored=keys[10:]), waits=waits)
    for key in keys[:3]:
        await batch.get(key)
    await asyncio.sleep(2 * waits.stopped_s)
    assert [found is None for found in await asyncio.gather(*(batch.get(key) for key in keys[10:14]))].count(False) == 1
    await batch.get(keys[14])
    found = await asyncio.gather(*(batch.get(key) for key in keys[20:40]))
    assert found == [SCORES] * 20


@in_virtual_time
async def test_scores_that_this_worker_puts_end_its_own_wait() -> None:
    shared = Shared("k")
    batch = CacheBatch(shared, waits=Waits(longest_s=60.0, poll_s=60.0))
    waiting = asyncio.ensure_future(batch.get("k"))
    while not batch.counters["waits"]:
        await asyncio.sleep(0)
    batch.put("k", SCORES)
    async with asyncio.timeout(10):
        assert await waiting == SCORES


async def test_what_was_put_is_found_before_it_is_written() -> None:
    shared = Shared()
    batch = CacheBatch(shared)
    batch.put("k", SCORES)
    assert await batch.get("k") == SCORES
    assert shared.looks == []
    await batch.aclose()
    assert shared.held == {"k": SCORES}


async def test_an_adapter_that_fails_while_others_wait_is_a_miss() -> None:
    shared = Shared("k")
    batch = CacheBatch(shared, waits=Waits(longest_s=60.0, poll_s=0.001))
    waiting = asyncio.ensure_future(batch.get("k"))
    while not batch.counters["waits"]:
        await asyncio.sleep(0)
    shared.away = True
    async with asyncio.timeout(10):
        assert await waiting is None
        assert await batch.get("other") is None
    shared.away = False
    again = asyncio.ensure_future(batch.get("k"))
    while batch.counters["waits"] < 2:
        await asyncio.sleep(0)
    shared.held["k"] = SCORES
    async with asyncio.timeout(10):
        assert await again == SCORES


async def test_closing_lets_nobody_wait() -> None:
    batch = CacheBatch(Shared("k"), waits=Waits(longest_s=60.0, poll_s=0.01))
    waiting = asyncio.ensure_future(batch.get("k"))
    while not batch.counters["waits"]:
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await batch.aclose()
        assert await waiting is None


async def test_one_who_is_cancelled_disturbs_no_other() -> None:
    shared = Shared("k")
    batch = CacheBatch(shared, waits=Waits(poll_s=0.001))
    one, other = asyncio.ensure_future(batch.get("k")), asyncio.ensure_future(batch.get("k"))
    while not batch.counters["waits"]:
        await asyncio.sleep(0)
    one.cancel()
    await asyncio.sleep(0)
    shared.held["k"] = SCORES
    async with asyncio.timeout(10):
        assert await other == SCORES


async def test_leases_are_released_where_no_scores_come() -> None:
    shared = Shared()
    batch = CacheBatch(shared)
    await batch.get("k")
    batch.release("k")
    await batch.aclose()
    assert shared.released == ["k"]


@pytest.mark.parametrize("held", [None, SCORES])
async def test_a_cache_that_nobody_shares_knows_no_waits(held: LabelScores | None) -> None:
    memory = MemoryCache()
    if held is not None:
        await memory.put_many({"k": held})
    batch = CacheBatch(memory)
    assert await batch.get("k") == held
    batch.release("k")
    await batch.aclose()
