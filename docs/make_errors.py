"""Bring the tables of docs/errors.md up to date with what the exceptions say of themselves.

python docs/make_errors.py
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING

from llm_datadist.status import EXCEPTIONS, LLMException

if TYPE_CHECKING:
    from collections.abc import Iterable

TARGET = Path(__file__).with_name("errors.md")
MARK = "<!-- from llm_datadist/status.py by docs/make_errors.py: {} -->\n"
END = "<!-- end -->\n"


def updated(page: str) -> str:
    """The page with both tables as they should be."""
    page = _replaced(
        page, "statuses", "status | class | also a | when | can it succeed later? | what to do", statuses()
    )
    return _replaced(page, "fields", "field | meaning", fields())


def _replaced(page: str, name: str, head: str, rows: Iterable[str]) -> str:
    before, rest = page.split(MARK.format(name))
    after = rest.split(END, 1)[1]
    ruler = "|".join(["---"] * len(head.split(" | ")))
    table = "".join(f"{line}\n" for line in (f"| {head} |", f"|{ruler}|", *rows))
    return before + MARK.format(name) + table + END + after


def statuses() -> Iterable[str]:
    """The rows of the first table: a status, its class, the class of Python that it is, too."""
    for kind in EXCEPTIONS.values():
        also = "".join(f"`{base.__name__}`" for base in kind.__bases__ if base is not LLMException)
        when = " ".join(inspect.cleandoc(kind.__doc__ or "").split()).removesuffix(".")
        yield (
            f"| `{kind.default_code.name}` | `{kind.__name__}` | {also or '-'} | {when} "
            f"| {kind.recoverable} | {kind.remedy} |"
        )


def fields() -> Iterable[str]:
    """The rows of the second table, from the docstring of LLMException."""
    attributes = inspect.cleandoc(LLMException.__doc__ or "").split("Attributes:\n")[1]
    for line in inspect.cleandoc(attributes).replace("\n    ", " ").splitlines():
        name, meaning = line.split(": ", 1)
        yield f"| `{name}` | {meaning.removesuffix('.').replace('``', '`')} |"


if __name__ == "__main__":
    TARGET.write_text(updated(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
