"""Chat templates as models carry them, in Jinja: alone knows their files, and finds the turns in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from worker.adapters.template_process import TemplateUnreadable, render
from worker.core.printable import printable
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
    system, *turns = SENTINELS
    shorter = (turns[:1], turns[:3])
    writes = _Renderer(source, special, (turns, *shorter), where)
    start, system_user, ask, close, ask_again, close_again, answer = _between(writes(*turns), SENTINELS, where)
    if (ask, close) != (ask_again, close_again):
        raise PromptError(f"{where}: the template writes equal turns differently; {_BY_HAND}")
    begun = writes.begins_with_bos(turns[0])
    for rest in shorter:
        expected = start + system + system_user + rest[0]
        for number, message in enumerate(rest[1:]):
            expected += (close if number % 2 else ask) + message
        if writes(*rest) != expected + answer:
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
    """A system message and alternating turns as the template writes them, with the answer begun."""

    def __init__(self, source: str, special: Mapping[str, str], turns: Sequence[Sequence[str]], where: str) -> None:
        """Renders `turns`, each with and without BOS and a system message. Raises ConfigError, PromptError."""
        if find_spec("jinja2") is None:
            raise ConfigError(f"{where}: a template_file needs Jinja: {INSTALL}")
        self._where = where
        self._bos = special["bos_token"]
        self._refuses_system = False
        asked = {
            (bos, takes_system, tuple(each)): ({**special, "bos_token": bos}, _messages(each, takes_system))
            for each in turns
            for bos in dict.fromkeys(("", self._bos))
            for takes_system in (True, False)
        }
        try:
            self._rendered = dict(zip(asked, render(source, list(asked.values())), strict=True))
        except TemplateUnreadable as error:
            raise PromptError(
                f"{where}: the chat template cannot be read: {_printable(str(error))}; {_BY_HAND}"
            ) from error

    def __call__(self, *turns: str, bos: str = "") -> str:
        """Without BOS. A template that takes no system message gets it before the first user message."""
        if not self._refuses_system:
            text = self._rendered[bos, True, turns]
            if isinstance(text, str):
                return text
            self._refuses_system = True
        text = self._rendered[bos, False, turns]
        if isinstance(text, str):
            return text
        raise PromptError(f"{self._where}: the chat template cannot be rendered ({_printable(text.why)}); {_BY_HAND}")

    def begins_with_bos(self, *turns: str) -> bool:
        return bool(self._bos) and self(*turns, bos=self._bos) == self._bos + self(*turns)


def _printable(text: str) -> str:
    """A template may raise what it likes, and terminals obey some of it."""
    return printable(text[:300], " ")


def _messages(turns: Sequence[str], takes_system: bool) -> list[dict[str, str]]:
    system, first, *rest = (SENTINELS[0], *turns)
    rows = [("system", system), ("user", first)] if takes_system else [("user", f"{system}\n\n{first}")]
    rows += [("user" if n % 2 else "assistant", text) for n, text in enumerate(rest)]
    return [{"role": role, "content": text} for role, text in rows]


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
