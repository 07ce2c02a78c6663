"""Scoring a labelled file: once, resumable, and one bad ticket harms no other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.core.sets import category_set
from tests.offline.populations import name_of
from tests.servers.stub_engine import StubEngine
from worker.adapters.files import Labelled
from worker.adapters.sglang import SGLangEngine
from worker.core.normalise import canonical
from worker.core.rules import Rules, RuleSet
from worker.core.scores import LabelScores
from worker.errors import EngineUnavailable
from worker.offline.scoring import ATTEMPTS, ScoredTicket, ScoreJournal, score_labelled
from worker.runtime.question import Question, prepare_question


@dataclass
class Desk:
    stub: StubEngine
    engine: SGLangEngine
    question: Question
    slept: list[float] = field(default_factory=list)
    seen: list[tuple[int, int]] = field(default_factory=list)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    async def score(
        self, tickets: list[Labelled], journal: Path | None = None, batch: int = 8, turn: int = 0
    ) -> list[ScoredTicket]:
        def progress(done: int, total: int) -> None:
            self.seen.append((done, total))

        return await score_labelled(
            self.question, self.engine, tickets, journal, batch, progress, sleep=self.sleep, turn=turn
        )

    async def asked(self, tickets: list[Labelled], journal: Path | None = None, batch: int = 8, turn: int = 0) -> int:
        """How many items the engine is asked about."""
        before = self.stub.counters.items
        await self.score(tickets, journal, batch, turn)
        return self.stub.counters.items - before


def rules(none: bool = False, examples: int = 1) -> RuleSet:
    return RuleSet(
        categories=category_set("billing", "login", "bug", none=none, examples=examples),
        rules=Rules.model_validate({"version": 1, "alpha": 0.1, "delta": 0.1}, strict=False),
    )


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    async with StubEngine() as stub:
        engine = SGLangEngine(stub.url)
        yield Desk(stub, engine, await prepare_question(rules(), engine))
        await engine.aclose()


def tickets(n: int, start: int = 0) -> list[Labelled]:
    return [Labelled(f"t{i}", f"ticket {name_of(i)}", "login") for i in range(start, start + n)]


async def test_scores_come_in_the_order_of_the_file_and_equal_the_engines(desk: Desk) -> None:
    asked = tickets(20)
    found = await desk.score(asked)
    assert [t.id for t in found] == [t.id for t in asked]
    alone = await desk.engine.score([desk.question.primitive.request(canonical(asked[13].text))])
    assert found[13].scores == alone[0]
    assert found[13].label == 1
    assert desk.seen[0] == (0, 20)
    assert desk.seen[-1] == (20, 20)
    assert max(desk.stub.counters.items_per_request) == 8 and desk.stub.counters.requests <= 5


async def test_what_the_rule_set_leaves_out_is_left_out_of_samples_too_and_is_in_the_fingerprint(desk: Desk) -> None:
    set_ = rules()
    style = set_.categories.prompt.model_copy(update={"canonicalise": ("urls",)})
    shorter = RuleSet(categories=set_.categories.model_copy(update={"prompt": style}), rules=set_.rules)
    whole = desk.question
    desk.question = await prepare_question(shorter, desk.engine)
    assert desk.question.fingerprints.differences(whole.fingerprints) == ("normaliser",)
    samples = [Labelled(f"t{n}", f"see https://desk.example/{n} again", "login") for n in range(5)]
    assert await desk.asked(samples) == 1
    found = await desk.score(samples)
    assert [ticket.text for ticket in found] == [sample.text for sample in samples]
    assert len({ticket.scores for ticket in found}) == 1


async def test_a_second_run_asks_only_for_what_is_missing(desk: Desk, tmp_path: Path) -> None:
    journal = tmp_path / "deep" / "scores.jsonl"
    first = await desk.score(tickets(20), journal)
    assert await desk.asked(tickets(20), journal) == 0
    assert await desk.asked(tickets(25), journal) == 5
    assert (await desk.score(tickets(20), journal)) == first


async def test_a_run_that_lost_its_engine_goes_on_where_it_ended(desk: Desk, tmp_path: Path) -> None:
    journal = tmp_path / "scores.jsonl"
    desk.stub.behaviour.capacity = 1
    original = desk.engine.score
    calls = 0

    async def leaves(requests):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls == 3:
            await desk.stub.stop()
        return await original(requests)

    desk.engine.score = leaves  # type: ignore[method-assign]
    with pytest.raises(EngineUnavailable):
        await desk.score(tickets(40), journal)
    assert len(desk.slept) == ATTEMPTS - 1
    assert desk.slept == sorted(desk.slept)
    assert len(journal.read_bytes().splitlines()) == 16
    await desk.stub.start()
    assert await desk.asked(tickets(40), journal) == 24


async def test_each_answer_is_on_disk_before_the_next_is_asked_for(desk: Desk, tmp_path: Path) -> None:
    journal = tmp_path / "scores.jsonl"
    original, lines = desk.engine.score, []

    async def watched(requests):  # type: ignore[no-untyped-def]
        lines.append(journal.read_bytes().count(b"\n"))
        return await original(requests)

    desk.engine.score = watched  # type: ignore[method-assign]
    await desk.score(tickets(24), journal)
    assert lines == [0, 8, 16]


async def test_an_engine_that_comes_back_is_asked_again(desk: Desk) -> None:
    desk.stub.behaviour.fault, desk.stub.behaviour.status, desk.stub.behaviour.times = "status", 503, 2
    desk.stub.behaviour.retry_after = "7"
    found = await desk.score(tickets(4))
    assert all(t.problem is None for t in found)
    assert desk.slept == [7.0, 7.0]


@pytest.mark.parametrize("cut", [1, 20, -1])
async def test_a_cut_off_last_line_is_scored_again_and_the_journal_is_whole_afterwards(
    desk: Desk, tmp_path: Path, cut: int
) -> None:
    journal = tmp_path / "scores.jsonl"
    await desk.score(tickets(10), journal)
    whole = journal.read_bytes()
    lines = whole.splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:cut])
    assert await desk.asked(tickets(10), journal) == 1
    assert journal.read_bytes() == whole


async def test_a_line_that_cannot_be_read_costs_one_ticket_only(desk: Desk, tmp_path: Path) -> None:
    journal = tmp_path / "scores.jsonl"
    await desk.score(tickets(10), journal)
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[4] = b'{"key": "x", "logprobs": [NaN], "mass": 1}\n'
    lines[5] = lines[5].replace(b'"logprobs":[-', b'"logprobs":[')  # a log-probability above 0
    journal.write_bytes(b"".join(lines))
    assert await desk.asked(tickets(10), journal) == 2


async def test_scores_of_another_question_are_not_reused(desk: Desk, tmp_path: Path) -> None:
    journal = tmp_path / "scores.jsonl"
    await desk.score(tickets(5), journal)
    desk.question = await prepare_question(rules(examples=2), desk.engine)
    assert await desk.asked(tickets(5), journal) == 5
    assert await desk.asked(tickets(5), journal) == 0


async def test_one_refused_ticket_does_not_take_its_neighbours_with_it(desk: Desk) -> None:
    desk.stub.behaviour.refused = name_of(3)
    found = await desk.score(tickets(8))
    assert {t.id: t.problem for t in found if t.problem} == {"t3": "engine_refused"}
    with pytest.raises(ValueError, match="engine_refused"):
        _ = found[3].scores


async def test_a_ticket_that_ends_the_connection_is_found_and_named(desk: Desk) -> None:
    desk.stub.behaviour.poison = name_of(5)
    found = await desk.score(tickets(8))
    assert {t.id: t.problem for t in found if t.problem} == {"t5": "engine_dropped"}


async def test_a_ticket_that_is_too_long_is_named_and_asked_again_next_time(desk: Desk, tmp_path: Path) -> None:
    journal = tmp_path / "scores.jsonl"
    long = Labelled("long", "word " * 30_000, "bug")
    found = await desk.score([*tickets(3), long], journal)
    assert [t.problem for t in found] == [None, None, None, "too_long"]
    assert await desk.asked([*tickets(3), long], journal) == 0  # not for its length either


async def test_a_ticket_that_the_worker_would_not_read_whole_certifies_nothing(desk: Desk) -> None:
    long = Labelled("long", "word " * 9000, "bug")
    assert [t.problem for t in await desk.score([*tickets(1), long])] == [None, "truncated"]
    length = desk.question.rule_set.rules.length.model_copy(update={"when_cut": "decide"})
    rules = desk.question.rule_set.rules.model_copy(update={"length": length})
    deciding = desk.question.rule_set.model_copy(update={"rules": rules})
    before = desk.question.fingerprints
    desk.question = await prepare_question(deciding, desk.engine)
    assert [t.problem for t in await desk.score([*tickets(1), long])] == [None, None]
    assert desk.question.fingerprints.differences(before) == ("prompt",)


async def test_an_answer_that_fails_validation_is_never_used(desk: Desk) -> None:
    desk.stub.behaviour.fault = "nan"
    found = await desk.score(tickets(2), batch=1)
    assert [t.problem for t in found] == ["invalid_answer", "invalid_answer"]


async def test_a_journal_keeps_which_labels_were_not_returned(desk: Desk, tmp_path: Path) -> None:
    partial = LabelScores.from_logprobs((-0.5, -3.0, -3.0), unknown=(1, 2))
    path = tmp_path / "scores.jsonl"
    with ScoreJournal(path, desk.question, 0) as journal:
        journal.add({"my bill": partial})
    found = await desk.score([Labelled("a", "my bill", "billing")], path)
    assert found[0].scores == partial


async def test_equal_texts_are_asked_about_once(desk: Desk) -> None:
    twins = [Labelled("a", "my  bill", "billing"), Labelled("b", "my bill ", "login"), Labelled("c", "\u200b", "bug")]
    assert await desk.asked(twins) == 1
    found = await desk.score(twins)
    assert found[0].scores == found[1].scores
    assert (found[0].label, found[1].label, found[2].problem) == (0, 1, "no_text")


async def test_a_second_turn_is_asked_again_beside_other_neighbours(desk: Desk, tmp_path: Path) -> None:
    journal = tmp_path / "scores.jsonl"
    batches: list[set[str]] = []
    original = desk.engine.score

    async def watched(requests):  # type: ignore[no-untyped-def]
        batches.append({request.item for request in requests})
        return await original(requests)

    desk.engine.score = watched  # type: ignore[method-assign]
    first = await desk.score(tickets(32), journal)
    second = await desk.score(tickets(32), journal, turn=1)
    assert not {frozenset(b) for b in batches[:4]} & {frozenset(b) for b in batches[4:]}
    assert first == second  # this engine answers the same whatever else is in the batch
    assert await desk.asked(tickets(32), journal, turn=1) == 0


@pytest.mark.parametrize(("declared", "label"), [(True, 3), (False, -1)])
async def test_a_ticket_of_no_category_has_the_label_of_none_where_the_set_has_one(
    desk: Desk, declared: bool, label: int
) -> None:
    desk.question = await prepare_question(rules(none=declared), desk.engine)
    found = await desk.score([Labelled("a", "hello", "none")])
    assert found[0].label == label
