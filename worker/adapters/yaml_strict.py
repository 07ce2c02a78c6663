"""Strict YAML: one document of plain data, or an error that names file and line.

YAML 1.1's surprises are refused or gone: `NO` is a string, dates are strings, `.nan` and `.inf` are errors, a key that
stands twice is an error, and there are no anchors, aliases or tags, so that nothing can explode.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

import orjson
import yaml
from pydantic import BaseModel, ValidationError

from worker.errors import RuleSetError

MAX_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 32

M = TypeVar("M", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """Only the scalars below are anything but strings."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own shape


for _tag, _pattern, _first in (
    ("bool", r"(?:true|false)$", "tf"),
    ("null", r"(?:null|~|)$", "n~\0"),
    ("int", r"-?(?:0|[1-9][0-9]*)$", "-0123456789"),
    ("float", r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?$", "-0123456789"),
    ("float", r"[-+]?\.(?:nan|NaN|NAN|inf|Inf|INF)$", "-+."),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


def load_model(path: Path, model: type[M]) -> M:
    """The file as a model. Raises RuleSetError with `file:line` and what is wrong there."""
    node = _compose(path)
    data = _plain(node, path, depth=0)
    try:
        # Through JSON, because strict models take lists for tuples there and nothing else is coerced.
        return model.model_validate_json(orjson.dumps(data))
    except ValidationError as error:
        problems = error.errors(include_url=False)
        first = problems[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise RuleSetError(
            f"{path}:{_line_of(node, first['loc'])}", f"{where + ': ' if where else ''}{message}{more}"
        ) from error


def _compose(path: Path) -> yaml.Node:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RuleSetError(str(path), f"larger than {MAX_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RuleSetError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RuleSetError(str(path), f"not UTF-8 at byte {error.start}") from error
    try:
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
                raise RuleSetError(_place(path, event.start_mark), "anchors and aliases are not allowed")
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise RuleSetError(_place(path, mark), f"not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise RuleSetError(str(path), f"not YAML: {type(error).__name__}") from error
    if node is None:
        raise RuleSetError(str(path), "the file is empty")
    return node


def _plain(node: yaml.Node, path: Path, depth: int) -> object:
    where = f"{path}:{node.start_mark.line + 1}"
    if depth > MAX_DEPTH:
        raise RuleSetError(where, "nested too deeply")
    if isinstance(node, yaml.MappingNode):
        found: dict[str, object] = {}
        for key, value in node.value:
            line = f"{path}:{key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode):
                raise RuleSetError(line, "a key must be a plain word")
            if key.value in found:
                raise RuleSetError(line, f"key '{key.value}' stands twice")
            found[key.value] = _plain(value, path, depth + 1)
        return found
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, path, depth + 1) for item in node.value]
    kind = node.tag.rpartition(":")[2]
    if kind == "float" and node.value.lower().lstrip("+-") in {".nan", ".inf"}:
        raise RuleSetError(where, f"{node.value} is not a number to decide by")
    match kind:
        case "str":
            return node.value
        case "bool":
            return node.value == "true"
        case "null":
            return None
        case "int":
            return _bounded_int(node.value, where)
        case "float":
            return float(node.value)
        case _:
            raise RuleSetError(where, f"tag {node.tag} is not allowed")


def _place(path: Path, mark: yaml.error.Mark | yaml._yaml.Mark | None) -> str:
    return f"{path}:{mark.line + 1}" if mark is not None else str(path)


def _bounded_int(text: str, where: str) -> int:
    if len(text) > 18:
        raise RuleSetError(where, "the number is too large")
    return int(text)


def _line_of(node: yaml.Node, location: tuple[int | str, ...]) -> int:
    """Line of the deepest part of the location that stands in the file (unions add parts that do not)."""
    for part in location:
        if isinstance(node, yaml.MappingNode):
            found = next((value for key, value in node.value if key.value == part), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            found = node.value[part]
        else:
            found = None
        if found is not None:
            node = found
    return int(node.start_mark.line) + 1
