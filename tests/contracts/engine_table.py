"""The table of docs/engines.md that says which engine keeps which case of the contract: made from the suite itself.

python -m tests.contracts.engine_table      writes it anew
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
BEGIN, END = "<!-- made by tests.contracts.engine_table -->\n", "<!-- end of the contract -->"

COLUMNS: Mapping[str, Mapping[str, str]] = {
    "SGLang 0.5.23": {"sglang_recorded": "recorded", "sglang_live": "live"},
    "vLLM 0.32.0": {"vllm_recorded": "recorded", "vllm_live": "live"},
    "llama.cpp's server": {"llama_cpp_server": "live"},
    "llama.cpp embedded": {"llama_cpp": "live"},
}
"""Column to the fixture's parameters behind it, and how each of them is asked."""
REMARKS: Mapping[tuple[str, str], str] = {
    ("test_unlikely_labels_are_scored_too", "llama.cpp's server"): "by an upper bound",
    ("test_a_ticket_scores_alone_as_it_does_in_a_batch", "llama.cpp's server"): "within 0.06",
    ("test_the_order_of_a_batch_does_not_change_scores", "llama.cpp's server"): "within 0.06",
}


def cases(module: ModuleType) -> list[str]:
    """Tests that run on every engine, in their order."""
    tests: list[tuple[str, Callable[..., object]]] = inspect.getmembers(module, inspect.isfunction)
    found = [
        test for name, test in tests if name.startswith("test_") and "engine" in inspect.signature(test).parameters
    ]
    return [test.__name__ for test in sorted(found, key=lambda test: test.__code__.co_firstlineno)]


def table(module: ModuleType) -> str:
    lines = [["case", *COLUMNS], ["---"] * (len(COLUMNS) + 1)]
    for name in cases(module):
        row = [name.removeprefix("test_").replace("_", " ")]
        for column, parameters in COLUMNS.items():
            remark = REMARKS.get((name, column))
            row.append(", ".join([*parameters.values(), *([remark] if remark else [])]))
        lines.append(row)
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def with_table(page: str, module: ModuleType) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table(module)}{END}{after}"


if __name__ == "__main__":
    from tests.contracts import test_engine

    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), test_engine), encoding="utf-8")
