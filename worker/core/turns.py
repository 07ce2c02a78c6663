"""Turns: the text that chat models expect around messages, by family, and what a tokenizer must make of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from worker.errors import PromptError

Tokenize = Callable[[Sequence[str]], Awaitable[list[list[int]]]]
"""Token ids of each text as a whole prompt, by the engine's own tokenizer."""

Text = Annotated[str, StringConstraints(max_length=20_000)]


class Turns(BaseModel):
    """What stands between the messages of a conversation: system, user, (assistant, user)*, and then the answer.

    Five texts are enough for every template that treats equal turns equally; `adapters.chat_template` finds them for
    one that is written in Jinja, and refuses others.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    bos: Text = Field("", description="begin-of-sequence text; sent only if the engine's tokenizer adds none itself")
    start: Text = Field(description="before the instruction")
    system_user: Text = Field(description="between the instruction and the first user message")
    user_assistant: Text = Field(description="between an example ticket and its answer")
    assistant_user: Text = Field(description="between an example's answer and the next ticket")
    answer: Text = Field(description="between the ticket and the answer; closes the think block of a thinking model")
    control: tuple[Text, ...] = Field(
        (), max_length=64, description="spellings in these texts that must be control tokens of the model"
    )


def _alike(
    start: str, to_user: str, to_assistant: str, *, control: Sequence[str], bos: str = "", think: str = ""
) -> Turns:
    """Turns of which each begins and ends the same way wherever it stands."""
    return Turns(
        bos=bos,
        start=start,
        system_user=to_user,
        user_assistant=to_assistant + think,
        assistant_user=to_user,
        answer=to_assistant + think,
        control=tuple(control),
    )


EMPTY_THINK = "<think>\n\n</think>\n\n"
"""What Qwen 3 and EXAONE 4.0 are given, by their own templates, in place of thoughts."""

_CHATML_CONTROL = ("<|im_start|>", "<|im_end|>")
_CHATML = ("<|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
_EXAONE_CONTROL = ("[|system|]", "[|user|]", "[|assistant|]", "[|endofturn|]")
_LLAMA_3 = "<|start_header_id|>{}<|end_header_id|>\n\n"

ChatTemplate = Literal["chatml", "chatml_no_thinking", "gemma", "llama3", "exaone", "exaone4"]

TEMPLATES: Mapping[ChatTemplate, Turns] = {
    "chatml": _alike(*_CHATML, control=_CHATML_CONTROL),
    "chatml_no_thinking": _alike(*_CHATML, control=_CHATML_CONTROL, think=EMPTY_THINK),
    # No role for a system: the instruction stands before the first user message (template of gemma-3-it).
    "gemma": Turns(
        bos="<bos>",
        start="<start_of_turn>user\n",
        system_user="\n\n",
        user_assistant="<end_of_turn>\n<start_of_turn>model\n",
        assistant_user="<end_of_turn>\n<start_of_turn>user\n",
        answer="<end_of_turn>\n<start_of_turn>model\n",
        control=("<start_of_turn>", "<end_of_turn>"),
    ),
    # Template of Meta-Llama-3-8B-Instruct; 3.1 and later write dates before the instruction, or work without.
    "llama3": _alike(
        _LLAMA_3.format("system"),
        "<|eot_id|>" + _LLAMA_3.format("user"),
        "<|eot_id|>" + _LLAMA_3.format("assistant"),
        bos="<|begin_of_text|>",
        control=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    # EXAONE 3.0 and 3.5 (as llama.cpp's llama-chat.cpp writes them): a user's turn ends with its line.
    "exaone": Turns(
        start="[|system|]",
        system_user="[|endofturn|]\n[|user|]",
        user_assistant="\n[|assistant|]",
        assistant_user="[|endofturn|]\n[|user|]",
        answer="\n[|assistant|]",
        control=_EXAONE_CONTROL,
    ),
    # chat_template.jinja of EXAONE-4.0, without enable_thinking.
    "exaone4": _alike(
        "[|system|]\n",
        "[|endofturn|]\n[|user|]\n",
        "[|endofturn|]\n[|assistant|]\n",
        control=_EXAONE_CONTROL,
        think=EMPTY_THINK,
    ),
}


async def fit_turns(turns: Turns, tokenize: Tokenize) -> Turns:
    """The turns as this tokenizer needs them: `bos` goes to the start where it adds none itself.

    Raises PromptError where it reads a control token as plain text: then the turns are another family's, and the model
    would see letters where it expects a turn.
    """
    control = [*turns.control, *([turns.bos] if turns.bos else [])]
    plain, *marked = await tokenize(["x", *(f"{spelling}x" for spelling in control)])
    split = [
        f"{spelling} ({len(ids) - len(plain)} tokens)"
        for spelling, ids in zip(control, marked, strict=True)
        if len(ids) != len(plain) + 1
    ]
    if split:
        raise PromptError(
            f"the chat template is not this model's: to its tokenizer, {', '.join(split)} is plain text; "
            "choose the chat_template of the model's family, or name its tokenizer_config.json as template_file"
        )
    adds_itself = not turns.bos or plain[0] == marked[-1][0]
    return turns.model_copy(update={"bos": "", "start": turns.start if adds_itself else turns.bos + turns.start})
