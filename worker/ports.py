"""What the runtime asks of the outside world: a ticket stream, a scoring engine and a score cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol, runtime_checkable

from worker.core.per_ticket import per_ticket
from worker.core.scores import LabelScores, ScoreRequest

Headers = tuple[tuple[str, bytes | None], ...]
"""Message headers in order, duplicates and None values kept."""


class Partition(NamedTuple):
    """One partition of an input topic."""

    topic: str
    number: int


@per_ticket
class Delivery:
    """One message as received. `epoch` counts the assignments of its partition to this process."""

    partition: Partition
    offset: int
    epoch: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int
    """Broker or producer timestamp; -1 where there is none."""


@per_ticket
class Output:
    """One message to be produced."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


@per_ticket
class Finished:
    """A delivery that reached its end: everything that has to be produced before its offset may be committed."""

    delivery: Delivery
    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class PartitionSettlement:
    """The finished prefix of one partition in offset order, and the offset to commit once it is delivered."""

    partition: Partition
    epoch: int
    finished: tuple[Finished, ...]
    next_offset: int


@dataclass(frozen=True, slots=True)
class Settlement:
    """What may be settled now: per partition, outputs in order and the offset that follows from them."""

    partitions: tuple[PartitionSettlement, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.partitions)


@dataclass(frozen=True, slots=True)
class RefusedOutput:
    """An output that the broker will never take (too large, not authorised, no such topic)."""

    delivery: Delivery
    output: Output
    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class Settled:
    """What came of a settlement.

    `committed` holds the next offset per partition that is now committed: a partition with a refused output is
    committed up to that delivery at most. Everything not committed is offered again.
    """

    committed: Mapping[Partition, int] = field(default_factory=dict)
    refused: tuple[RefusedOutput, ...] = ()


@dataclass(frozen=True, slots=True)
class Paused:
    """Which assigned partitions deliver nothing for now: all, or the named ones."""

    everything: bool = False
    partitions: frozenset[Partition] = frozenset()


@dataclass(frozen=True, slots=True)
class Gap:
    """A partition whose next message should have had the offset `expected`, and whose log says otherwise."""

    partition: Partition
    expected: int
    found: int
    """Below `expected`: the log is another one from here on (the topic was made anew, or lost its end with a broker).
    Above: what lies between was deleted before it was read."""

    @property
    def stepped_back(self) -> bool:
        return self.found < self.expected

    @property
    def expired(self) -> int:
        """Offsets that were deleted unread."""
        return max(0, self.found - self.expected)


class AssignmentListener(Protocol):
    """Called by a stream on its own thread, from inside `poll` or `close`."""

    def assigned(self, epochs: Mapping[Partition, int]) -> None:
        """These partitions now deliver, under these epochs (each higher than any before it)."""

    def revoking(self, partitions: Sequence[Partition]) -> Settlement:
        """These partitions are about to leave: finish what is in flight (within the listener's own limit)
        and return what may still be settled. The stream settles it and reports through `released`."""

    def released(self, partitions: Sequence[Partition], settled: Settled) -> None:
        """These partitions are gone after an orderly revocation; what was settled on the way out is given."""

    def lost(self, partitions: Sequence[Partition]) -> None:
        """These partitions already belong to somebody else: forget them, settle nothing."""

    def gap(self, gap: Gap) -> None:
        """A partition's log is not what it was. Where it stepped back, `lost` and `assigned` follow: nothing that was
        known about its offsets holds for what they are now."""


class TicketStream(Protocol):
    """Tickets in, outputs and offsets out. Every method is called from one and the same thread.

    Delivery is at least once, or exactly once where the adapter offers it: an offset is committed only with or after
    every output that belongs to it, and to all before it in its partition; per partition, outputs are produced in
    offset order.
    """

    def open(self, listener: AssignmentListener) -> None:
        """Join the group. Raises ConfigError where the input topic does not exist or a broker cannot be reached."""

    def poll(self, max_records: int, timeout_s: float) -> Sequence[Delivery]:
        """At most `max_records` deliveries, after at most about `timeout_s`; runs the listener's callbacks.

        Goes on serving callbacks while paused. Raises StreamFatal.
        """

    def set_paused(self, paused: Paused) -> None:
        """Exactly these partitions deliver nothing, partitions assigned later included."""

    def settle(self, settlement: Settlement) -> Settled:
        """Produce all outputs, wait for their acknowledgements, then commit the offsets.

        Partitions of another epoch than the current one are left out. Raises StreamRetriable where nothing is known
        to be committed and the same may be offered again (duplicates are then possible, loss is not), StreamFatal.
        """

    def assignment(self) -> Mapping[Partition, int]:
        """Partitions now assigned, with their epochs."""

    def lag(self) -> Mapping[Partition, int | None]:
        """For every assigned partition, messages between what `poll` delivered last and the end of the partition.

        Those count that cannot be delivered yet because their transaction is open. None where the end or the start is
        not known (yet). Asks the brokers for starts and for ends that no fetch tells, seldom and not for long.
        """

    def trouble(self) -> str | None:
        """One sentence on what is wrong with the brokers just now (all down, authentication), else None."""

    def close(self) -> None:
        """Leave the group; assigned partitions go through `revoking` and `released` first."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What scored: everything that changes scores when it changes goes into `model` and `tokenizer`."""

    engine: str
    """Adapter name: sglang, llama_cpp, openai_compat, systemone."""
    model: str
    """Name or digest of the weights as the engine states it."""
    tokenizer: str
    """Digest of how a fixed set of probe texts is tokenized."""
    context_tokens: int
    """The longest prompt, in tokens, that the engine accepts."""
    notes: tuple[str, ...] = ()
    """Sentences for the operator, such as a coarse log-probability grid."""


class ScoringEngine(Protocol):
    """Scores labels as the next token behind a prompt, in one forward pass each; writes no text."""

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        """One row a request, in order. All requests share `prefix` and `label_token_ids`.

        Raises EngineUnavailable, EngineDropped, RequestRefused, InvalidAnswer: then for none of them is anything
        known; and TooLong where a single request was given and does not fit.
        """

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text as a whole prompt, with BOS where the model wants one, control tokens made of what
        spells them."""

    async def identity(self) -> EngineIdentity:
        """Asks the engine once; raises EngineUnavailable or ConfigError."""

    async def probe(self) -> None:
        """Raises EngineUnavailable unless the engine would take a request now."""

    async def aclose(self) -> None:
        """Give back connections, threads and memory."""


@runtime_checkable
class ShowsPieces(Protocol):
    """An engine that says what its tokens are."""

    async def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself; bytes that are no whole character show as U+FFFD."""


@runtime_checkable
class ShowsTemplate(Protocol):
    """An engine that says how its own chat template writes a conversation."""

    async def tokenize_turns(self, messages: Sequence[tuple[str, str]]) -> list[int] | None:
        """Token ids of (role, text) messages and the beginning of an answer without thoughts; None where the engine
        has no template, or its template refuses these messages."""


class ScoreCache(Protocol):
    """Label scores by key. Fails open: a cache that is away, slow or full of garbage is a miss, never an error."""

    async def get_many(self, keys: Sequence[str]) -> Sequence[LabelScores | None]:
        """In the order of the keys; None is a miss."""

    async def put_many(self, items: Mapping[str, LabelScores]) -> None:
        """Best effort."""

    async def probe(self) -> str | None:
        """None when it works, else one sentence on what is wrong."""

    async def aclose(self) -> None: ...


class Lease(Enum):
    """Who scores what is not in a shared cache yet."""

    OURS = "ours"
    """This worker, from now on or since before."""
    THEIRS = "theirs"
    """Another worker, until its lease ends."""


@runtime_checkable
class SharedScoreCache(ScoreCache, Protocol):
    """A cache of several workers, by which they agree who scores a key that all of them miss."""

    async def get_or_lease(self, keys: Sequence[str], lease_s: float) -> Sequence[LabelScores | Lease | None]:
        """As `get_many`, in as many round trips; every key that nobody holds is leased to this worker for `lease_s`.

        A lease ends by itself, when scores are put, or when it is released. None is a miss of which nothing could be
        agreed (the cache is away, or takes no writes).
        """

    async def put_many(self, items: Mapping[str, LabelScores], released: Sequence[str] = ()) -> None:
        """Best effort, in as many round trips: leases of this worker on `released` end now, too."""
