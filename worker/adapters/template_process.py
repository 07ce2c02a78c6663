"""Renders a chat template in a process of its own: alone knows how much time, memory and text one may take.

A Jinja sandbox keeps a template from the machine, and lets it loop and grow for ever: no bound inside the process holds
against `9 ** (9 ** 9)` or a string that is multiplied. What a model's file holds is somebody else's code, so it gets a
process with limits that the kernel keeps. As a script it reads a request from standard input and writes the answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CPU_S = 3
"""Of the processor's time, Python's start included; templates of DeepSeek V3, Gemma 3, Llama 3.1 and Qwen 3 took up to
0.17 s (Python 3.11, x86-64)."""
MEMORY_BYTES = 512 * 2**20
MAX_CHARS = 100_000
"""Of one conversation as a template writes it."""
DEADLINE_S = 60.0
"""On a machine that has no time for the process."""
KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
"""Environment variables that Python may need. The others are nothing to a template: there are secrets among them."""


class TemplateUnreadable(Exception):
    """A template that does not compile, or takes more than it may; the text says what."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a conversation was not rendered, in the template's words or Jinja's: they may hold any character."""

    why: str


def render(
    source: str, conversations: Sequence[tuple[Mapping[str, str], Sequence[Mapping[str, str]]]]
) -> list[str | Failed]:
    """What the template writes for each conversation: special tokens by name, and messages. Raises TemplateUnreadable.

    Jinja must be installed.
    """
    request = json.dumps({"source": source, "conversations": list(conversations)})
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    try:
        # -P: the folder of this file is none to import from. No bytecode is written, so a read-only disk will do.
        done = subprocess.run(  # noqa: S603  # this very file
            [sys.executable, "-P", "-s", "-B", __file__],
            input=request.encode(),
            capture_output=True,
            timeout=DEADLINE_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TemplateUnreadable(f"it was not rendered within {DEADLINE_S:g} s") from None
    except OSError as error:
        raise TemplateUnreadable(f"no process to render it in could be started ({error.strerror})") from error
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise TemplateUnreadable(f"it takes more than {CPU_S} s of processor time: a loop without an end?")
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise TemplateUnreadable(f"the process that rendered it ended with {done.returncode}") from None
    if "unreadable" in answer:
        raise TemplateUnreadable(answer["unreadable"])
    return [Failed(each["failed"]) if "failed" in each else each["text"] for each in answer["rendered"]]


def _limit() -> None:
    """From here on the kernel ends this process, or refuses it memory."""
    try:
        import resource
    except ImportError:  # Windows: the deadline is left
        return
    for kind, amount, hardest in (
        (resource.RLIMIT_CPU, CPU_S, CPU_S + 1),
        (resource.RLIMIT_AS, MEMORY_BYTES, MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # macOS has no bound on memory
            resource.setrlimit(kind, (amount, hardest))


def _environment() -> Any:
    """As transformers 4.57 has it: sandboxed, with its extensions and helpers."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what a model is trained on, and writes nothing itself."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own shape

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson  # Jinja's own escapes HTML
    environment.globals["raise_exception"] = raise_exception
    # No strftime_now: a prompt that changes every day would be another question every day. Llama 3.2 then takes
    # a fixed date.
    return environment


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _rendered(template: Any, special: Mapping[str, str], messages: Sequence[Mapping[str, str]]) -> dict[str, str]:
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.generate(
            **special,
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=True,
            enable_thinking=False,  # Qwen 3, EXAONE 4.0, GLM 4.5
            thinking=False,  # DeepSeek V3.1, Granite 3
        ):
            size += len(piece)
            if size > MAX_CHARS:
                return {"failed": f"it writes more than {MAX_CHARS:,} characters"}
            pieces.append(piece)
    except MemoryError:
        return {"failed": f"it takes more than {MEMORY_BYTES // 2**20} MiB of memory"}
    except Exception as error:  # noqa: BLE001 - a template may fail in any way that code can
        return {"failed": str(error)[:1_000] or type(error).__name__}
    return {"text": "".join(pieces)}


def main() -> None:
    """One request from standard input, one answer to standard output."""
    request = json.load(sys.stdin)
    environment = _environment()
    _limit()
    try:
        template = environment.from_string(request["source"])
    except MemoryError:
        answer: dict[str, Any] = {"unreadable": f"it takes more than {MEMORY_BYTES // 2**20} MiB of memory"}
    except Exception as error:  # noqa: BLE001 - constants are computed while it is compiled
        answer = {"unreadable": str(error)[:1_000] or type(error).__name__}
    else:
        answer = {"rendered": [_rendered(template, *conversation) for conversation in request["conversations"]]}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
