"""Chat templates as models carry them, in Jinja: alone knows how they are rendered, and finds the turns in one.

They are rendered as transformers 4.57 renders them: sandboxed, with its extensions and helpers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from worker.core.turns import Turns
from worker.errors import ConfigError, PromptError

MAX_BYTES = 64 * 1024 * 1024
"""A tokenizer_config.json may list thousands of tokens."""
INSTALL = "pip install 'ticket-router[templates]'"
JINJA_FILE, CONFIG_FILE, TOKENIZER_FILE = "chat_template.jinja", "tokenizer_config.json", "tokenizer.json"
SENTINELS = tuple(f"zqx{name}xqz" for name in ("system", "one", "answerone", "two", "answertwo", "three"))
"""Messages that no template holds and none trims; what stands between them is the template's own."""
THINK_TAGS = ("think", "thought")


def load_turns(path: Path) -> Turns:
    """The turns of a model's tokenizer_config.json (or a chat_template.jinja, which may lie beside it).

    Raises PromptError where the file or its template cannot be used, ConfigError where Jinja is not installed.
    """
    is_jinja = path.suffix in (".jinja", ".j2")
    config_path = path.with_name(CONFIG_FILE) if is_jinja else path
    config = {} if is_jinja and not config_path.is_file() else _config(config_path)
    jinja_path = path if is_jinja else path.with_name(JINJA_FILE)
    source = _template(config, path) if not is_jinja else None
    if source is None:
        if not jinja_path.is_file() and not is_jinja:
            raise PromptError(f"{path}: holds no chat template, and no {JINJA_FILE} lies beside it: a base model's?")
        try:
            source = _read(jinja_path).decode("utf-8")
        except UnicodeDecodeError as error:
            raise PromptError(f"{jinja_path}: not UTF-8; a Jinja template is expected") from error
    special = {name: _token(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return find_turns(source, special, _control_tokens(config, path.with_name(TOKENIZER_FILE)), str(path))


def find_turns(source: str, special: Mapping[str, str], known: Sequence[str], where: str) -> Turns:
    """Renders conversations of sentinels and reads off what lies between them.

    `special` are the texts of bos_token, eos_token and so on, `known` the model's control tokens. Raises PromptError
    where equal turns are not treated equally: five texts cannot say that.
    """
    render = _Renderer(source, special, where)
    system, one, answer_one, two, answer_two, three = SENTINELS
    start, system_user, ask, close, ask_again, close_again, answer = _between(
        render(system, one, answer_one, two, answer_two, three), SENTINELS, where
    )
    if (ask, close) != (ask_again, close_again):
        raise PromptError(f"{where}: the template writes equal turns differently; {_BY_HAND}")
    begun = render.begins_with_bos(system, one)
    for rest in ((one,), (one, answer_one, two)):
        expected = start + system + system_user + rest[0]
        for number, message in enumerate(rest[1:]):
            expected += (close if number % 2 else ask) + message
        if render(system, *rest) != expected + answer:
            raise PromptError(f"{where}: the template depends on the number of turns; {_BY_HAND}")
    texts = (start, system_user, ask, close, answer)
    if not (system_user and ask and close and answer):
        raise PromptError(f"{where}: the template writes nothing between two messages; {_BY_HAND}")
    if any(" at 0x" in text for text in texts):
        raise PromptError(
            f"{where}: the template writes a Python object out, which reads otherwise each time the worker starts"
        )
    try:
        return Turns(
            bos=special["bos_token"] if begun else "",
            start=start,
            system_user=system_user,
            user_assistant=ask,
            assistant_user=close,
            answer=_think_closed(answer),
            control=tuple(dict.fromkeys(t for t in known if t.strip() and any(t in text for text in texts)))[:64],
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise PromptError(f"{where}: what the template writes is no text: {first['msg']}; {_BY_HAND}") from error


_BY_HAND = "write `turns` into categories.yaml by hand (docs/rule-sets.md)"


def _between(text: str, messages: Sequence[str], where: str) -> list[str]:
    """The text before, between and after the messages, each of which must stand there once, in order."""
    found = []
    for message in messages:
        before, once, text = text.partition(message)
        if not once or message in text:
            raise PromptError(f"{where}: the template does not write each message once, in order; {_BY_HAND}")
        found.append(before)
    return [*found, text]


def _think_closed(answer: str) -> str:
    """A model that always thinks is given an opened think block: it is closed, empty."""
    for tag in THINK_TAGS:
        if answer.rfind(f"<{tag}>") > answer.rfind(f"</{tag}>"):
            return f"{answer.rstrip()}\n\n</{tag}>\n\n"
    return answer


class _Renderer:
    """A conversation of a system message and alternating turns as the template writes it, with the answer begun."""

    def __init__(self, source: str, special: Mapping[str, str], where: str) -> None:
        try:
            from jinja2 import TemplateError, nodes
            from jinja2.ext import Extension
            from jinja2.parser import Parser
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ModuleNotFoundError as error:
            raise ConfigError(f"{where}: a template_file needs Jinja: {INSTALL}") from error

        class Generation(Extension):
            """`{% generation %}` marks what a model is trained on, and writes nothing itself."""

            tags = {"generation"}  # noqa: RUF012 - Jinja's own shape

            def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        self._where = where
        self._special = special
        self._refuses_system = False
        self._errors: tuple[type[Exception], ...] = (
            TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson  # Jinja's own escapes HTML

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        environment.globals["raise_exception"] = raise_exception
        # No strftime_now: a prompt that changes every day would be another question every day. Llama 3.2 then takes
        # a fixed date.
        try:
            self._template = environment.from_string(source)
        except self._errors as error:
            raise PromptError(f"{where}: the chat template cannot be read: {_printable(error)}") from error

    def __call__(self, system: str, *turns: str) -> str:
        """Without BOS. A template that takes no system message gets it before the first user message."""
        return self._rendered("", system, *turns)

    def begins_with_bos(self, system: str, *turns: str) -> bool:
        bos = self._special["bos_token"]
        return bool(bos) and self._rendered(bos, system, *turns) == bos + self._rendered("", system, *turns)

    def _rendered(self, bos: str, system: str, *turns: str) -> str:
        if not self._refuses_system:
            try:
                return self._render(bos, [{"role": "system", "content": system}, *_messages(turns)])
            except self._errors:
                self._refuses_system = True
        try:
            return self._render(bos, _messages((f"{system}\n\n{turns[0]}", *turns[1:])))
        except self._errors as error:
            raise PromptError(
                f"{self._where}: the chat template cannot be rendered ({_printable(error)}); {_BY_HAND}"
            ) from error

    def _render(self, bos: str, messages: list[dict[str, str]]) -> str:
        return str(
            self._template.render(
                **{**self._special, "bos_token": bos},
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                enable_thinking=False,  # Qwen 3, EXAONE 4.0, GLM 4.5
                thinking=False,  # DeepSeek V3.1, Granite 3
            )
        )


def _printable(error: Exception) -> str:
    """A template may raise what it likes, and terminals obey some of it."""
    return "".join(character if character.isprintable() else " " for character in str(error)[:300])


def _messages(turns: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(turns)]


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _config(path: Path) -> dict[str, Any]:
    try:
        config = orjson.loads(_read(path))
    except orjson.JSONDecodeError as error:
        raise PromptError(f"{path}: not JSON; a tokenizer_config.json or a .jinja file is expected") from error
    if not isinstance(config, dict):
        raise PromptError(f"{path}: not a JSON object; a tokenizer_config.json or a .jinja file is expected")
    return config


def _template(config: Mapping[str, Any], path: Path) -> str | None:
    """A text, or several by name, of which `default` is for conversations."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise PromptError(f"{path}: its chat_template is no text")
    return template


def _control_tokens(config: Mapping[str, Any], tokenizer: Path) -> list[str]:
    """From the configuration, or from tokenizer.json where that lies beside it and the configuration lists none."""
    added = config.get("added_tokens_decoder")
    tokens = list(added.values()) if isinstance(added, dict) else []
    if not tokens and tokenizer.is_file():
        listed = _config(tokenizer).get("added_tokens")
        tokens = listed if isinstance(listed, list) else []
    return [_token(token) for token in tokens]


def _token(token: object) -> str:
    """Tokens are texts, or objects with the text in `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise PromptError(f"{path}: too large for a template ({path.stat().st_size} bytes)")
        return path.read_bytes()
    except OSError as error:
        raise PromptError(f"{path}: cannot be read: {error.strerror}") from error
