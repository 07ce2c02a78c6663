"""TypedQuestions: questions that requests bring along, made ready for the engine once and asked like any other.

A question becomes a prompt with labels, checked by the engine's tokenizer behind the whole of that prompt, and a Router
of its own without a calibration: cache, batches, retries and endpoints are those of every ticket.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from worker.core.labels import Tokenize
from worker.core.primitives import ChooseOne
from worker.core.rules import RuleSet
from worker.core.systemone import TypedQuestion
from worker.core.ticket import Ticket
from worker.core.turns import Turns
from worker.core.typed_question import as_rule_set, put, unlabelled_prompt
from worker.errors import RouterError, TooLong
from worker.runtime.router import Routed, Router

MakeRouter = Callable[[RuleSet, ChooseOne], Router]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A question that may be asked; `tokens` is what it takes of a prompt besides the text."""

    router: Router
    tokens: int

    async def ask(self, text: str) -> Routed:
        """`text` is canonical. Never raises but for cancellation and bugs: without scores the decision says why."""
        return await self.router.route(Ticket(id=None, text=text))


class Crowded(RouterError):
    """More questions are being made ready than the engine has time for: the client asks again later."""


@dataclass(slots=True, eq=False)
class _Preparation:
    """A question that is made ready, or waits for its turn."""

    question: TypedQuestion
    waiters: dict[asyncio.Future[Prepared], object] = field(default_factory=dict)
    """Each has a future of its own, so that whoever leaves disturbs nobody; and the request that it belongs to."""
    task: asyncio.Task[Prepared] | None = None


class TypedQuestions:
    """Keeps the last `most_kept` questions; prepares `at_once` at a time, and equal ones once.

    Requests take turns, a question each. What nobody waits for any more is not made ready. Beyond `most_under_way` a
    request that has a question waiting may bring no other: whoever brings many cannot keep out who brings one.
    """

    def __init__(
        self,
        *,
        turns: Turns | None,
        tokenize: Tokenize,
        context_tokens: int,
        make_router: MakeRouter,
        most_kept: int = 256,
        most_under_way: int = 256,
        at_once: int = 2,
    ) -> None:
        """`turns` are those of the engine's chat model, None for a base model."""
        self._turns = turns
        self._tokenize = tokenize
        self._context_tokens = context_tokens
        self._make_router = make_router
        self._most_kept = most_kept
        self._most_under_way = most_under_way
        self._at_once = at_once
        self._kept: OrderedDict[TypedQuestion, Prepared] = OrderedDict()
        self._under_way: dict[TypedQuestion, _Preparation] = {}
        self._waiting: OrderedDict[object, dict[TypedQuestion, None]] = OrderedDict()
        """By request, in the order of their turns: its questions that are not begun yet. Never an empty one."""
        self._tasks: set[asyncio.Task[Prepared]] = set()
        """Those given up included, until they have let go of the engine."""

    @property
    def under_way(self) -> int:
        """Questions that are being made ready or wait for it."""
        return len(self._under_way)

    async def prepared(self, question: TypedQuestion, request: object) -> Prepared:
        """`request` is compared by identity or hash: the questions of one take turns with those of another.

        Raises LabelError where the engine lacks labels for it, TooLong where no text fits behind it, EngineError,
        Crowded.
        """
        found = self._kept.get(question)
        if found is not None:
            self._kept.move_to_end(question)
            return found
        preparation = self._under_way.get(question)
        if preparation is None:
            if len(self._under_way) >= self._most_under_way and request in self._waiting:
                raise Crowded(f"{len(self._under_way)} questions are being made ready")
            preparation = self._under_way[question] = _Preparation(question)
        waiter: asyncio.Future[Prepared] = asyncio.get_running_loop().create_future()
        preparation.waiters[waiter] = request
        if preparation.task is None:
            self._waiting.setdefault(request, {})[question] = None
            self._begin()
        try:
            return await waiter
        finally:
            self._leave(preparation, waiter)

    async def tokens_of(self, text: str) -> int:
        """Tokens of a text by itself. Raises EngineError."""
        return len((await self._tokenize([text or "x"]))[0])

    async def aclose(self) -> None:
        self._waiting.clear()
        for preparation in self._under_way.values():
            for waiter in preparation.waiters:
                waiter.cancel()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self) -> None:
        """As many as may be at once, each of the request whose turn it is."""
        while self._waiting and len(self._tasks) < self._at_once:
            request, questions = next(iter(self._waiting.items()))
            self._waiting.move_to_end(request)
            preparation = self._under_way[next(iter(questions))]
            for other in set(preparation.waiters.values()):
                self._unqueue(other, preparation.question)
            preparation.task = asyncio.create_task(self._prepare(preparation.question))
            self._tasks.add(preparation.task)
            preparation.task.add_done_callback(lambda done, preparation=preparation: self._end(preparation, done))  # type: ignore[misc]

    def _unqueue(self, request: object, question: TypedQuestion) -> None:
        questions = self._waiting.get(request)
        if questions is not None:
            questions.pop(question, None)
            if not questions:
                del self._waiting[request]

    def _leave(self, preparation: _Preparation, waiter: asyncio.Future[Prepared]) -> None:
        request = preparation.waiters.pop(waiter)
        if waiter.done() and not waiter.cancelled():
            waiter.exception()  # else asyncio would log it, where its request is cancelled in the same moment
        question = preparation.question
        if self._under_way.get(question) is not preparation:
            return  # it has ended
        if preparation.task is None and request not in preparation.waiters.values():
            self._unqueue(request, question)
        if not preparation.waiters:
            del self._under_way[question]
            if preparation.task is not None:
                preparation.task.cancel()

    async def _prepare(self, question: TypedQuestion) -> Prepared:
        rule_set = as_rule_set(question, self._turns)
        # Before labels are tried, each behind a copy of the prompt: one that does not fit would cost as much.
        prompt = unlabelled_prompt(rule_set)
        tokens = await self.tokens_of(prompt.prefix + prompt.item("x"))
        if tokens > self._context_tokens:
            raise TooLong(tokens, self._context_tokens)
        return Prepared(self._make_router(rule_set, await put(question, rule_set, self._tokenize)), tokens)

    def _end(self, preparation: _Preparation, done: asyncio.Task[Prepared]) -> None:
        self._tasks.discard(done)
        error = None if done.cancelled() else done.exception()
        if self._under_way.get(preparation.question) is preparation:
            del self._under_way[preparation.question]
            for waiter in preparation.waiters:
                if waiter.done():
                    continue
                if done.cancelled():
                    waiter.cancel()
                elif error is not None:
                    waiter.set_exception(error)  # the next who asks tries again
                else:
                    waiter.set_result(done.result())
            if not done.cancelled() and error is None:
                self._keep(preparation.question, done.result())
        self._begin()

    def _keep(self, question: TypedQuestion, prepared: Prepared) -> None:
        self._kept[question] = prepared
        while len(self._kept) > self._most_kept:
            self._kept.popitem(last=False)
