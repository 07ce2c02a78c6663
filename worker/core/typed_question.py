"""How a typed question is put to a model: as a category set of its own, whose labels a legend explains."""

from __future__ import annotations

from worker.core.categories import Category, CategorySet, PromptStyle
from worker.core.labels import Labels, Tokenize, allocate_words, check_labels
from worker.core.primitives import ChooseOne
from worker.core.prompt import Prompt, build_prompt
from worker.core.rules import Rules, RuleSet
from worker.core.systemone import TypedQuestion
from worker.core.turns import Turns
from worker.errors import LabelError

HEADING, CUE = "Text:", "Answer:"
WITHOUT_INSTRUCTIONS = {
    "noul": "Is it so?",
    "choice": "Which of these fits the text?",
    "score": "Which of these levels fits the text?",
}
RULES = Rules(version=1, alpha=0.1, delta=0.1)
"""Nothing is routed by them: without a calibration every decision keeps its scores and goes nowhere."""


def as_rule_set(question: TypedQuestion, turns: Turns | None) -> RuleSet:
    """The question as a rule set of its own; `turns` are those of a chat model, None for a base model."""
    prompt = PromptStyle(
        instruction=question.instructions or WITHOUT_INSTRUCTIONS[question.type],
        ticket_heading=HEADING,
        answer_cue=CUE,
        **({"style": "base"} if turns is None else {"style": "chat", "turns": turns}),
    )
    categories = tuple(
        Category(id=f"o{place}", name=name, description=meaning or name)
        for place, (name, meaning) in enumerate(zip(question.names, question.meanings, strict=True))
    )
    return RuleSet(
        categories=CategorySet(id="systemone", version=1, language="en", prompt=prompt, categories=categories),
        rules=RULES,
    )


def unlabelled_prompt(rule_set: RuleSet) -> Prompt:
    """The prompt before its labels are chosen: as long as the real one but for a few tokens, and ending like it."""
    return build_prompt(rule_set.categories, ["?"] * len(rule_set.categories.ids), legend=True)


async def put(question: TypedQuestion, rule_set: RuleSet, tokenize: Tokenize) -> ChooseOne:
    """The question with its labels, which were checked behind its prompt: yes and no, or else letters and the like.

    Raises LabelError where the tokenizer has too few single tokens, EngineError.
    """
    if question.type == "noul":
        try:
            return await _with_words(rule_set, list(question.names), tokenize)
        except LabelError:
            pass
    words = await allocate_words(unlabelled_prompt(rule_set), len(question.names), tokenize)
    return await _with_words(rule_set, words, tokenize)


def with_labels(rule_set: RuleSet, labels: Labels) -> ChooseOne:
    """A question with labels that were checked behind another one of as many options and the same turns: the prompts
    end alike, and so the labels are the same tokens."""
    return ChooseOne(build_prompt(rule_set.categories, labels.words, legend=True), labels)


async def _with_words(rule_set: RuleSet, words: list[str], tokenize: Tokenize) -> ChooseOne:
    prompt = build_prompt(rule_set.categories, words, legend=True)
    return ChooseOne(prompt, await check_labels(prompt, words, tokenize))
