"""Several questions about one ticket: asked at once, each on its own, and none of them can lose the ticket."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import pytest

from tests.core.sets import artefact, rule_set
from tests.core.test_questions import EMERGENCY, URGENCY, with_questions
from tests.core.test_two_levels import primitive as two_levels
from tests.runtime.engines import IDENTITY, ScriptedEngine
from tests.runtime.test_router import Cache
from worker.core.labels import Labels
from worker.core.policy import Calibration, NoCalibration, reason
from worker.core.primitives import ChooseOne, Primitive
from worker.core.prompt import Prompt
from worker.core.rules import RuleSet
from worker.core.scores import LabelScores, ScoreRequest
from worker.core.ticket import Ticket
from worker.errors import EngineUnavailable, RequestRefused
from worker.runtime.asking import Asker, Patience
from worker.runtime.batcher import Batcher
from worker.runtime.cache_batch import CacheBatch
from worker.runtime.endpoints import EnginePool, Health
from worker.runtime.limiter import RetryBudget
from worker.runtime.question import score_texts
from worker.runtime.router import Asked, Routed, Router

INSULT = {**EMERGENCY, "id": "insult", "cue": "Insult:"}
DUTY = {
    "kind": "answer",
    "name": "duty",
    "question": "emergency",
    "is": "yes",
    "probability": 0.5,
    "then": "escalate",
    "topic": "desk.duty",
}
RUDE = {**DUTY, "name": "rude", "question": "insult", "topic": None, "when_unknown": "ignore"}
RULES = with_questions(EMERGENCY, INSULT, URGENCY, answers=[DUTY, RUDE])
MAIN = ChooseOne(Prompt("p", "\n:"), Labels(("a", "b", "c"), (1, 2, 3)))
YES_NO = Labels(("yes", "no"), (10, 11))
OWN: dict[str, ChooseOne] = {
    "emergency": ChooseOne(Prompt("p", "\nEmergency:"), YES_NO),
    "insult": ChooseOne(Prompt("p", "\nInsult:"), YES_NO),
    "urgency": ChooseOne(Prompt("p", "\nUrgency:"), Labels(("A", "B", "C"), (20, 21, 22))),
}


class Answering(ScriptedEngine):
    """`label 1` as ScriptedEngine; `yes` to a question of which the ticket has the first letter in brackets, as [E]."""

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        plain = await super().score(requests)
        return [self._row(request, row) for request, row in zip(requests, plain, strict=True)]

    def _row(self, request: ScoreRequest, plain: LabelScores) -> LabelScores:
        if request.label_token_ids != (10, 11):
            return plain
        text, _, cue = str(request.item).partition("\n")
        yes = 0.9 if f"[{cue[0]}]" in text else 0.05
        return LabelScores.from_logprobs((math.log(yes), math.log(0.95 - yes)))


class Bench:
    def __init__(
        self,
        engine: ScriptedEngine,
        *,
        rules: RuleSet = RULES,
        main: Primitive = MAIN,
        uncalibrated: Sequence[str] = (),
        max_items: int = 8,
        **patience: object,
    ) -> None:
        self.engine = engine
        self.cache = Cache()
        clock = asyncio.get_running_loop().time
        pool = EnginePool(
            [("one", engine)],
            main.request("probe"),
            IDENTITY,
            Health(failures_to_open=50, probe_interval_s=1.0),
            clock=clock,
            sleep=self.sleep,
            on_change=lambda *_: None,
            on_call=lambda *_: None,
        )
        self.batcher = Batcher(pool.score, max_items=max_items, max_wait_s=0.001, concurrency=8)
        none = NoCalibration(reason("uncalibrated", detail="nobody did"))
        self.router = Router(
            rule_set=rules,
            primitive=main,
            calibration=Calibration(artefact(rules)) if main is MAIN else none,
            asker=Asker(
                cache=CacheBatch(self.cache),
                batcher=self.batcher,
                pool=pool,
                budget=RetryBudget(clock, share=1.0),
                patience=Patience(**patience),  # type: ignore[arg-type]
                clock=clock,
                sleep=self.sleep,
                jitter=lambda: 1.0,
            ),
            clock=clock,
            cache_key=lambda tenant, text: f"own/{text}",
            further=[
                Asked(
                    question,
                    OWN[question.id],
                    none if question.id in uncalibrated else Calibration(artefact(rules.for_question(question))),
                    self._key(question.id),
                )
                for question in rules.questions.questions
            ],
        )

    @staticmethod
    def _key(name: str) -> Callable[[str | None, str], str]:
        return lambda tenant, text: f"{name}/{text}"

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)

    async def route(self, text: str) -> Routed:
        async with asyncio.timeout(10):
            return await self.router.route(Ticket(id="1", text=text))


def codes(routed: Routed) -> list[str]:
    return [why.code for why in routed.decision.reasons]


async def test_every_question_is_asked_behind_the_same_prefix_and_ticket_and_answered_in_its_order() -> None:
    bench = Bench(Answering())
    routed = await bench.route("label 1")
    assert (routed.decision.action, routed.decision.category, codes(routed)) == ("route", "login", ["certified"])
    assert [a.question for a in routed.decision.answers] == ["emergency", "insult", "urgency"]
    assert [a.answer for a in routed.decision.answers] == ["no", "no", "2"]
    items = sorted(item for call in bench.engine.calls for item in call)
    assert items == sorted(f" label 1\n{cue}" for cue in (":", "Emergency:", "Insult:", "Urgency:"))


async def test_an_emergency_goes_to_the_duty_topic_though_its_category_is_certified() -> None:
    routed = await Bench(Answering()).route("label 1 [E]")
    assert (routed.decision.action, routed.decision.topic, codes(routed)) == (
        "escalate",
        "desk.duty",
        ["answer_escalation"],
    )
    assert (await Bench(Answering()).route("label 1 [I]")).decision.topic == "desk.human"


async def test_questions_with_the_same_labels_go_in_one_call() -> None:
    bench = Bench(Answering())
    await asyncio.gather(*(bench.route(f"label 1 {n}") for n in range(3)))
    assert sorted(len(call) for call in bench.engine.calls) == [3, 3, 6]


async def test_all_questions_share_one_cache_round_trip_and_have_keys_of_their_own() -> None:
    bench = Bench(Answering())
    first = await bench.route("label 1 [E]")
    assert bench.cache.reads == [4]
    await asyncio.sleep(0)
    assert set(bench.cache.held) == {f"{name}/label 1 [E]" for name in ("own", "emergency", "insult", "urgency")}
    second = await bench.route("label 1 [E]")
    assert second.cached
    assert second.score_s is None
    assert all(answer.cached for answer in second.decision.answers)
    assert [a.distribution for a in second.decision.answers] == [a.distribution for a in first.decision.answers]
    assert len(bench.engine.calls) == 3


async def test_only_what_the_cache_does_not_hold_is_asked() -> None:
    bench = Bench(Answering())
    await bench.route("label 1")
    await asyncio.sleep(0)
    for name in ("own", "emergency", "insult"):
        bench.cache.held[f"{name}/label 1 again"] = bench.cache.held[f"{name}/label 1"]
    bench.engine.calls.clear()
    routed = await bench.route("label 1 again")
    assert bench.engine.calls == [[" label 1 again\nUrgency:"]]
    assert routed.cached
    assert [a.cached for a in routed.decision.answers] == [True, True, False]
    assert routed.score_s is not None


@pytest.mark.parametrize(
    ("cue", "action", "expected"),
    [("Emergency", "escalate", ["question_unanswered"]), ("Insult", "route", ["certified"])],
)
async def test_a_question_that_cannot_be_scored_is_unknown_and_the_ticket_goes_on(
    cue: str, action: str, expected: list[str]
) -> None:
    def refuse(requests: Sequence[ScoreRequest]) -> None:
        if any(cue in r.item for r in requests):
            raise RequestRefused("HTTP 400", 400)

    routed = await Bench(Answering(refuse)).route("label 1 [E]" if cue == "Insult" else "label 1")
    if cue == "Insult":  # the emergency is still seen
        assert (routed.decision.topic, codes(routed)) == ("desk.duty", ["answer_escalation"])
        routed = await Bench(Answering(refuse)).route("label 1")
    assert (routed.decision.action, codes(routed)) == (action, expected)
    assert routed.decision.category == "login"
    (unknown,) = (a for a in routed.decision.answers if a.answer is None)
    assert unknown.problem is not None
    assert (unknown.question, unknown.problem.code) == (cue.lower(), "engine_refused")


async def test_a_ticket_whose_own_question_cannot_be_scored_still_reaches_the_duty_desk() -> None:
    def refuse(requests: Sequence[ScoreRequest]) -> None:
        if any(str(r.item).endswith("\n:") for r in requests):
            raise RequestRefused("HTTP 400", 400)

    routed = await Bench(Answering(refuse)).route("label 1 [E]")
    assert (routed.decision.topic, codes(routed)) == ("desk.duty", ["answer_escalation", "engine_refused"])


async def test_a_bug_in_a_further_question_costs_its_answer_and_not_the_ticket() -> None:
    bench = Bench(Answering())
    asked = bench.router._further[2]

    class Broken(ChooseOne):
        def request(self, text: str) -> ScoreRequest:
            raise ZeroDivisionError

    broken = Asked(
        asked.question, Broken(asked.primitive.prompt, asked.primitive.labels), asked.calibration, asked.cache_key
    )
    bench.router._further = (*bench.router._further[:2], broken)
    routed = await bench.route("label 1")
    assert routed.decision.action == "route"
    problem = routed.decision.answers[2].problem
    assert problem is not None
    assert "ZeroDivisionError" in problem.sentence


async def test_an_uncalibrated_question_is_recorded_and_rules_take_it_as_unknown() -> None:
    routed = await Bench(Answering(), uncalibrated=["emergency"]).route("label 1 [E]")
    assert (routed.decision.action, routed.decision.topic) == ("escalate", "desk.human")
    assert codes(routed) == ["question_unanswered"]
    assert (routed.decision.answers[0].answer, routed.decision.answers[0].probability) == ("yes", None)


async def test_a_cancelled_ticket_leaves_no_question_behind() -> None:
    bench = Bench(Answering(delay_s=30))
    before = asyncio.all_tasks()
    ticket = asyncio.create_task(bench.router.route(Ticket(id="1", text="x")))
    await asyncio.sleep(0.05)
    ticket.cancel()
    await asyncio.gather(ticket, return_exceptions=True)
    await asyncio.sleep(0)
    left = asyncio.all_tasks() - before
    assert not [task for task in left if "Router" in repr(task)]
    await bench.batcher.aclose()


async def test_an_override_asks_nothing() -> None:
    override = {"kind": "keyword", "name": "k", "any": ["fire"]}
    bench = Bench(Answering(), rules=with_questions(EMERGENCY, URGENCY, answers=[DUTY], overrides=[override]))
    routed = await bench.route("fire label 1 [E]")
    assert (codes(routed), routed.decision.answers, bench.engine.calls) == (["override_escalation"], (), [])


# -- two levels --------------------------------------------------------------------------------------------------------

SIX = ("c0", "c1", "c2", "c3", "c4", "c5")


class Levels(ScriptedEngine):
    """Departments .5, .4, .05; the first category inside each .6."""

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[LabelScores]:
        await super().score(requests)
        return [
            LabelScores.from_logprobs(
                (math.log(0.5), math.log(0.4), math.log(0.05))
                if r.label_token_ids == (0, 1, 2)
                else (math.log(0.6), *(math.log(0.3 / (len(r.label_token_ids) - 1)),) * (len(r.label_token_ids) - 1))
            )
            for r in requests
        ]


async def test_two_levels_are_asked_in_rounds_and_cached_as_one() -> None:
    bench = Bench(Levels(), rules=rule_set(*SIX), main=two_levels())
    routed = await bench.route("x")
    assert bench.engine.calls == [[" x:"], [" x: d1 >"], [" x: d2 >"]]
    assert routed.decision.category == "c0"
    assert routed.decision.scores is not None
    assert math.exp(routed.decision.scores.logprobs[0]) == pytest.approx(0.3)
    await asyncio.sleep(0)
    assert list(bench.cache.held) == ["own/x"]
    assert (await bench.route("x")).cached
    assert len(bench.engine.calls) == 3


async def test_all_rounds_of_a_question_share_the_tickets_deadline() -> None:
    bench = Bench(Levels(delay_s=0.3), rules=rule_set(*SIX), main=two_levels(), deadline_s=0.5)
    assert codes(await bench.route("x")) == ["engine_timeout"]
    await bench.batcher.aclose()


async def test_a_failure_in_the_second_round_is_retried_without_asking_for_the_department_again() -> None:
    failed = []

    def turn(requests: Sequence[ScoreRequest]) -> None:
        if " d1 >" in str(requests[0].item) and not failed:
            failed.append(1)
            raise EngineUnavailable("busy")

    bench = Bench(Levels(turn), rules=rule_set(*SIX), main=two_levels())
    await bench.route("x")
    assert [call[0] for call in bench.engine.calls] == [" x:", " x: d1 >", " x: d1 >", " x: d2 >"]


async def test_many_texts_go_round_by_round_in_groups_that_an_engine_takes() -> None:
    engine, groups = Levels(), []

    async def ask(requests: Sequence[ScoreRequest]) -> dict[ScoreRequest, LabelScores | str]:
        assert len({(r.prefix, r.label_token_ids) for r in requests}) == 1
        groups.append(len(requests))
        rows = await engine.score(requests)
        return {r: "too_long" if " bad:" in str(r.item) else row for r, row in zip(requests, rows, strict=True)}

    found = await score_texts(two_levels(), ["a", "bad", "c"], ask)
    assert groups == [3, 2, 2]
    assert found["bad"] == "too_long"
    assert found["a"] == found["c"]
