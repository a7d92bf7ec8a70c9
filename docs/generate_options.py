"""Write the tables of ``options.md`` from the code; what stands outside of the marks is left as it is.

``python docs/generate_options.py`` writes the page, ``--check`` only tells whether it is up to date (exit code 1: it is
not). A test holds that it is.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llm_datadist.configs import LlmConfig
from llm_datadist.configs.options import Option
from llm_datadist.datadist import init_options
from llm_datadist.engine import options as engine_options
from llm_datadist.engine.options import EngineOptions
from llm_datadist.utils import environment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PAGE: Final = Path(__file__).with_name("options.md")
_MARK: Final = "<!-- {} {}: written by docs/generate_options.py -->"
_KEY: Final = re.compile(r'"((?:llm|ge)\.[A-Za-z.]+)"')
_CODE: Final = re.compile(
    r"(?<!\w)'([^']+)'(?!\w)|\{.*\}|''|(?<![\w.])(?:LLM_DATADIST|[a-z]+)(?:_[A-Za-z]+)+\b(?:\(\))?|\b[a-z]+\(\)"
)
"""Quoted values, JSON, names with an underscore, and calls."""
_NO_VALUE: Final = "\N{EN DASH}"


def properties() -> dict[str, Option[object]]:
    """The options of :class:`LlmConfig` by name, as they are declared."""
    return {name: option for name, option in vars(LlmConfig).items() if isinstance(option, Option)}


def keys(option: Option[object]) -> list[str]:
    """The keys of the option dictionary that a property writes; none for ``ge_options``, which holds keys itself."""
    key = option._key  # noqa: SLF001 - the only place that knows
    if isinstance(key, str):
        return [key]
    return [] if key is dict else list(key(0))


def further_keys() -> list[str]:
    """Keys that ``init`` reads or writes and that no property stands for."""
    known = {key for option in properties().values() for key in keys(option)}
    sources = inspect.getsource(engine_options) + inspect.getsource(init_options)
    return sorted(set(_KEY.findall(sources)) - known)


def variables() -> dict[str, str]:
    """Environment variables and their meaning, in the order of the module."""
    texts = [each.__doc__ or "" for each in vars(environment).values() if inspect.isfunction(each)]
    return dict(_described(text) for text in texts if text.startswith("``"))


def _described(text: str) -> tuple[str, str]:
    """The variables that the docstring of their function begins with, and the rest of it."""
    names, _, meaning = " ".join(text.split()).partition(": ")
    return names.replace("``", "`"), meaning.replace("; None when unset", "").replace("``", "`")


def _default(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`" if isinstance(value, (int, float)) else _NO_VALUE


def _prose(text: str) -> str:
    """Names of code as such, and nothing that ends a cell of a table."""
    return _CODE.sub(lambda found: f"`{found[1] or found[0]}`", text).replace("|", "\\|")


def option_table() -> Iterator[str]:
    """The properties, then the keys without one."""
    yield "| `LLMConfig`, key | default | meaning |"
    yield "|---|---|---|"
    for name, option in properties().items():
        names = "<br>".join(f"`{each}`" for each in (name, *keys(option)))
        yield f"| {names} | {_default(option._default)} | {_prose(option.__doc__ or '')} |"  # noqa: SLF001
    yield ""
    yield f"Transfer paths: {', '.join(f'`{path}`' for path in EngineOptions().paths)}, the best first."
    yield ""
    yield f"`init` also looks at {', '.join(f'`{key}`' for key in further_keys())}; no property writes them."


def environment_table() -> Iterator[str]:
    """The environment variables."""
    yield "| variable | meaning |"
    yield "|---|---|"
    for names, meaning in variables().items():
        yield f"| {names} | {meaning.replace('|', chr(92) + '|')} |"


def render(page: str, parts: Mapping[str, Iterator[str]]) -> str:
    """The page with each part between its marks replaced.

    Raises:
        ValueError: the page lacks a mark.
    """
    for name, lines in parts.items():
        begin, end = _MARK.format("begin", name), _MARK.format("end", name)
        head, found, rest = page.partition(begin)
        _, ended, tail = rest.partition(end)
        if not found or not ended:
            message = f"{PAGE.name} has no lines {begin!r} and {end!r}: put them where the table belongs"
            raise ValueError(message)
        page = head + "\n".join((begin, "", *lines, "", end)) + tail
    return page


def current() -> str:
    """The page as it should be."""
    parts = {"options": option_table(), "environment": environment_table()}
    return render(PAGE.read_text(encoding="utf-8"), parts)


def main(arguments: list[str]) -> int:
    """Write or check."""
    page = current()
    if arguments == ["--check"]:
        return int(PAGE.read_text(encoding="utf-8") != page)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
