"""Further questions: what else is asked about a ticket, put behind the same ticket in the same prompt.

The prompt up to and including the ticket is the rule set's own, so an engine that keeps its state computes it once for
all questions, and adding a question changes neither the prompt nor the calibration of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from worker.core.canonicalisers import scored_text
from worker.core.categories import Category, CategoryId, CategorySet, Identifier, LabelWord, Line, Strict
from worker.core.labels import Labels, Tokenize, allocate_words, check_labels
from worker.core.misplaced import Misplaced, Place, refuse_twice, same_when_read
from worker.core.prompt import Prompt
from worker.errors import LabelError

LONGEST_ID = 63
"""Of the ids of set and question together, which name the category set that the answers are."""
COLUMNS = frozenset({"id", "text", "label", "language", "lang", "tenant", "channel", "created_at"})
"""What files of tickets have columns for besides answers: no question is called so."""


def _no_column(name: str) -> str:
    if name in COLUMNS:
        raise ValueError(f"'{name}' is a column that files of tickets have: call the question otherwise")
    return name


QuestionId = Annotated[Identifier, AfterValidator(_no_column)]
AnswerId = Annotated[CategoryId, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
"""An answer as people write it: `yes`, `4`, or an option's id."""


class Option(Strict):
    """One possible answer."""

    id: AnswerId
    name: Line
    label: LabelWord | None = Field(None, description="single-token word; without it one is chosen, see core.labels")


class Level(Strict):
    """One step of a scale."""

    name: Line
    label: LabelWord | None = Field(None, description="single-token word; without it the step's number is tried first")


class Example(Strict):
    """A ticket with its answer. It stands behind every ticket that is asked about, so it costs tokens each time."""

    text: Line
    answer: AnswerId


class _Question(Strict):
    id: QuestionId = Field(description="names calibration.<id>.json and the column of labelled files")
    ask: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=4000)] = Field(
        description="the question, one or more lines; stands behind the ticket"
    )
    cue: Line = Field(description="what the answer follows, such as `Emergency:`")
    examples: tuple[Example, ...] = Field((), max_length=16)

    @property
    def options(self) -> tuple[Option, ...]:
        """Every possible answer, in label order."""
        raise NotImplementedError

    def place_of(self, number: int) -> Place:
        """Where an answer stands in the question as it is written; nowhere by itself, where it is understood."""
        return ()

    @property
    def legend(self) -> bool:
        """Whether the prompt lists what the labels stand for even where they are words."""
        return True

    @model_validator(mode="after")
    def _sound(self) -> Self:
        ids, of, rows = [o.id for o in self.options], f"question '{self.id}': ", list(enumerate(self.options))
        refuse_twice(f"{of}answer", [(o.id, (*self.place_of(n), "id")) for n, o in rows])
        refuse_twice(f"{of}label", [(o.label, self.place_of(n)) for n, o in rows if o.label is not None])
        refuse_twice(f"{of}name", [(o.name, self.place_of(n)) for n, o in rows], same_when_read)
        for number, example in enumerate(self.examples):
            if example.answer not in ids:
                raise Misplaced(
                    f"{of}example answer '{example.answer}' is none of {', '.join(ids)}", "examples", number, "answer"
                )
        return self


class YesNoQuestion(_Question):
    """Is it so? Answers `yes` and `no`."""

    kind: Literal["yes_no"]
    yes: LabelWord = "yes"
    no: LabelWord = "no"

    @property
    def options(self) -> tuple[Option, ...]:
        return (Option(id="yes", name="yes", label=self.yes), Option(id="no", name="no", label=self.no))

    @property
    def legend(self) -> bool:
        return False


class ScoreQuestion(_Question):
    """How much? Answers `1` (the first level) to `n`, with an expected value."""

    kind: Literal["score"]
    levels: tuple[Level, ...] = Field(min_length=2, max_length=10, description="lowest first")

    @property
    def options(self) -> tuple[Option, ...]:
        return tuple(
            Option(id=str(number), name=level.name, label=level.label) for number, level in enumerate(self.levels, 1)
        )

    def place_of(self, number: int) -> Place:
        return ("levels", number)


class ChooseOneQuestion(_Question):
    """Which of these?"""

    kind: Literal["choose_one"]
    choices: tuple[Option, ...] = Field(
        min_length=2, max_length=26, alias="options", description="`none` may be one of them"
    )

    @property
    def options(self) -> tuple[Option, ...]:
        return self.choices

    def place_of(self, number: int) -> Place:
        return ("options", number)


FurtherQuestion = Annotated[YesNoQuestion | ScoreQuestion | ChooseOneQuestion, Field(discriminator="kind")]


class Questions(Strict):
    """questions.yaml."""

    questions: tuple[FurtherQuestion, ...] = Field((), max_length=16)

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        refuse_twice("question", [(q.id, ("questions", n, "id")) for n, q in enumerate(self.questions)])
        return self

    def by_id(self, question_id: str) -> FurtherQuestion | None:
        return next((question for question in self.questions if question.id == question_id), None)


def as_category_set(question: FurtherQuestion, categories: CategorySet) -> CategorySet:
    """The question as a category set of its own: its answers are the categories. For calibration and checks.

    Raises pydantic's ValidationError where the two ids together are too long for one.
    """
    shown = {
        option.id: tuple(example.text for example in question.examples if example.answer == option.id)
        for option in question.options
    }
    return CategorySet(
        id=f"{categories.id}_{question.id}",
        version=categories.version,
        language=categories.language,
        prompt=categories.prompt.model_copy(update={"instruction": question.ask, "answer_cue": question.cue}),
        categories=tuple(
            Category(
                id=option.id,
                name=option.name,
                description=f"{question.ask} {question.cue} {option.name}"[:2000],
                label=option.label,
                examples=shown[option.id],
            )
            for option in question.options
        ),
    )


@dataclass(frozen=True, slots=True)
class Behind:
    """A further question, and the prompt of the rule set's own in whose place it stands behind the ticket."""

    question: FurtherQuestion
    asked: Prompt
    first_cue: str
    """In which `asked` ends."""


async def choose_question_labels(behind: Behind, answers: CategorySet, tokenize: Tokenize) -> tuple[Prompt, Labels]:
    """The question's prompt and its labels in the order of `answers` (`as_category_set`, possibly in another order).

    Words where all are distinct single tokens; letters and the like where they are not and none is stated. Raises
    LabelError.
    """
    words = [answer.label or answer.id for answer in answers.categories]
    prompt = question_prompt(behind, answers, words, legend=False)
    try:
        return prompt, await check_labels(prompt, words, tokenize)
    except LabelError as error:
        if any(answer.label for answer in answers.categories):
            raise LabelError(f"question '{behind.question.id}': {error.problem}", error.offenders) from error
    words = await allocate_words(prompt, len(words), tokenize)
    prompt = question_prompt(behind, answers, words, legend=True)
    return prompt, await check_labels(prompt, words, tokenize)


def question_prompt(behind: Behind, answers: CategorySet, words: Sequence[str], *, legend: bool) -> Prompt:
    """The rule set's prompt with this question behind the ticket in place of its own; `words` in answer order."""
    question = behind.question
    lines = [question.ask]
    if legend or question.legend:
        lines += [f"{word}: {answer.name}" for word, answer in zip(words, answers.categories, strict=True)]
    if answers.prompt.style == "chat":
        lines.append(f"Answer with one of these words only: {', '.join(words)}.")
    word = dict(zip(answers.ids, words, strict=True))
    # Canonical, as tickets are: an example that was copied from a ticket must not write a turn either.
    shown = [(scored_text(example.text, answers.prompt.canonicalise), example.answer) for example in question.examples]
    lines += [f"“{text}” {question.cue} {word[answer]}" for text, answer in shown]
    return put_behind(behind.asked, behind.first_cue, lines, question.cue)


def put_behind(asked: Prompt, first_cue: str, lines: Sequence[str], cue: str) -> Prompt:
    """The same prefix and ticket, then `lines`, then `cue` in place of `first_cue`. Raises ValueError."""
    end = asked.suffix.removesuffix(first_cue)
    if end == asked.suffix:
        raise ValueError(f"the prompt does not end in its cue '{first_cue}', so no question can follow in its place")
    return Prompt(asked.prefix, "".join(f"\n{line}" for line in lines) + end + cue)
