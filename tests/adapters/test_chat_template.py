"""Chat templates in Jinja: which turns are found in one, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from worker.adapters import template_process
from worker.adapters.chat_template import find_turns, load_turns
from worker.adapters.files import load_rule_set
from worker.core.turns import TEMPLATES, Turns
from worker.errors import ConfigError, PromptError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SIMPLE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
EXAONE_4 = """
{%- set roles = {'system': '[|system|]', 'user': '[|user|]', 'assistant': '[|assistant|]'} %}
{%- for i in range(messages | length) %}
    {%- set m = messages[i] %}
    {%- if m.role not in roles %}{{ raise_exception('no such role: ' ~ m.role) }}{% endif %}
    {%- if m.role != 'assistant' %}
        {{- roles[m.role] ~ '\\n' ~ m.content ~ '[|endofturn|]\\n' }}
        {%- continue %}
    {%- endif %}
    {{- roles.assistant ~ '\\n<think>\\n\\n</think>\\n\\n' ~ m.content ~ '[|endofturn|]\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- roles.assistant ~ '\\n' }}
    {%- if enable_thinking is defined and enable_thinking %}{{ '<think>\\n' }}
    {%- else %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""


def found(source: str, special: dict[str, str] | None = None, known: tuple[str, ...] = ()) -> Turns:
    return find_turns(source, special or SPECIAL, known, "here")


def test_the_turns_are_what_stands_between_messages() -> None:
    assert found(SIMPLE, known=("<s>", "</s>", "<|user|>", "\n", "<|tool|>")) == Turns(
        bos="<s>",
        start="<|system|>\n",
        system_user="</s>\n<|user|>\n",
        user_assistant="</s>\n<|assistant|>\n",
        assistant_user="</s>\n<|user|>\n",
        answer="</s>\n<|assistant|>\n",
        control=("</s>", "<|user|>"),
    )


def test_a_template_with_loop_controls_and_thoughts_is_exaone_4() -> None:
    assert found(EXAONE_4).model_copy(update={"control": TEMPLATES["exaone4"].control}) == TEMPLATES["exaone4"]


def test_a_template_without_system_messages_gets_them_before_the_first_user_message() -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + SIMPLE
    turns = found(refusing)
    assert (turns.start, turns.system_user) == ("<|user|>\n", "\n\n")


@pytest.mark.parametrize("opened", ["<think>\n", "<think>"])
def test_an_opened_think_block_is_closed_empty(opened: str) -> None:
    always = SIMPLE.replace("<|assistant|>\n{% endif %}", "<|assistant|>\n" + opened + "{% endif %}")
    assert found(always).answer == "</s>\n<|assistant|>\n<think>\n\n</think>\n\n"
    thought = found(always.replace("think>", "thought>"))
    assert thought.answer == "</s>\n<|assistant|>\n<thought>\n\n</thought>\n\n"


def test_what_a_model_is_trained_on_may_be_marked() -> None:
    marked = SIMPLE.replace("{{ m.content | trim }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    assert found(marked) == found(SIMPLE)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}", "writes equal turns differently"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "each message once"),
        ("{{ messages[-1].content }}", "each message once"),
        (
            "{{ messages | length }}{% for m in messages %}|{{ m.content }}{% endfor %}",
            "depends on the number of turns",
        ),
        ("{% for m in messages %}", "cannot be read"),
        ("{{ strftime_now('%d') }}" + SIMPLE, "strftime_now"),
        ("{{ ''.__class__.__mro__ }}" + SIMPLE, "unsafe"),
        ("{{ raise_exception('only on Mondays') }}", "only on Mondays"),
        ("{{ 1 / 0 }}", "division"),
    ],
)
def test_what_five_texts_cannot_say_is_refused(source: str, problem: str) -> None:
    with pytest.raises(PromptError, match=problem):
        found(source)


def test_a_template_that_takes_a_fixed_date_where_there_is_no_clock_is_taken() -> None:
    dated = "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% else %}26 Jul 2024{% endif %}" + SIMPLE
    assert found(dated).start == "26 Jul 2024<|system|>\n"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "{{ 1 }}"}, {"name": "default", "template": SIMPLE}]
    config = {"chat_template": named, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    assert load_turns(path) == found(SIMPLE)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("nothing", "not JSON"),
        ("[1]", "not a JSON object"),
        ("{}", "holds no chat template"),
        ('{"chat_template": 5}', "no text"),
        (None, "cannot be read"),
    ],
)
def test_a_file_without_a_template_is_refused_by_name(tmp_path: Path, content: str | None, problem: str) -> None:
    path = tmp_path / "tokenizer_config.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(PromptError, match=rf"tokenizer_config.json: .*{problem}"):
        load_turns(path)


def test_without_jinja_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"ticket-router\[templates\]"):
        found(SIMPLE)


def test_a_rule_set_takes_the_template_that_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": SIMPLE, **SPECIAL}), encoding="utf-8")
    (tmp_path / "rules.yaml").write_text("version: 1\nalpha: 0.1\ndelta: 0.1\n", encoding="utf-8")
    (tmp_path / "categories.yaml").write_text(
        "id: desk\nversion: 1\nlanguage: en\n"
        "prompt:\n  style: chat\n  template_file: tokenizer_config.json\n  instruction: Sort.\n"
        "categories:\n  - {id: a, name: A, description: a}\n  - {id: b, name: B, description: b}\n",
        encoding="utf-8",
    )
    assert load_rule_set(tmp_path).categories.prompt.chat_turns == found(SIMPLE)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "nothing between"),
        ("{% for m in messages %}{{ raise_exception }}<{{ m.role }}>{{ m.content }}{% endfor %}<a>", "Python object"),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ '\\ud800' }}{% endfor %}<a>", "no text"),
        ("{{ raise_exception('\x1b[2J') }}", "cannot be rendered . .2J"),
    ],
)
def test_what_cannot_be_five_texts_is_refused_in_plain_words(template: str, said: str) -> None:
    with pytest.raises(PromptError, match=said) as refused:
        found(template)
    assert str(refused.value).isprintable()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "3 s of processor time"),
        ("{{ 9 ** (9 ** 9) }}", "processor time|512 MiB"),
        ("{{ 'x' * 9999999999 }}", "512 MiB"),
        ("{% set n = messages | length * 9999999999 %}{{ 'x' * n }}", "512 MiB"),
        ("{{ messages[0].content.ljust(9999999999) }}", "512 MiB"),
        ("{% for a in range(99999) %}{{ messages[0].content }}{% endfor %}", "more than 100,000 characters"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}", "cannot be re"),
        ("{{ range(999999999) | list }}", "Range too big"),
    ],
)
def test_a_template_without_an_end_is_refused_in_time_and_in_bounds(template: str, said: str) -> None:
    with pytest.raises(PromptError, match=said) as refused:
        found(template + SIMPLE)
    assert "by hand" in str(refused.value)


def test_a_template_sees_no_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUTER_ENGINE_API_KEY", "hunter2")
    monkeypatch.setattr(template_process, "__file__", str(Path(__file__).with_name("shows_environment.py")))
    with pytest.raises(template_process.TemplateUnreadable) as told:
        template_process.render("", [])
    assert "PATH" in str(told.value) and "ROUTER" not in str(told.value)


def test_a_template_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_bytes(b"\xff\xfe{{ messages }}")
    with pytest.raises(PromptError, match="not UTF-8"):
        load_turns(tmp_path / "t.jinja")
