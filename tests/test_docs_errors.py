"""The tables of docs/errors.md are what their generator makes of the code."""

from __future__ import annotations

import runpy
from pathlib import Path

from llm_datadist import LLMException
from llm_datadist.status import EXCEPTIONS

SCRIPT = Path(__file__).parents[1] / "docs" / "make_errors.py"


def test_the_page_is_up_to_date() -> None:
    made = runpy.run_path(str(SCRIPT))
    page = SCRIPT.with_name("errors.md").read_text(encoding="utf-8")
    assert page == made["updated"](page), "run: python docs/make_errors.py"
    for code, kind in EXCEPTIONS.items():
        assert kind.__doc__, kind
        assert f"| `{code.name}` | `{kind.__name__}` |" in page
        assert kind.recoverable in page
        assert kind.remedy in page
    for name in set(vars(LLMException("text"))) - {"_status_code"}:
        assert f"| `{name}` |" in page


def test_a_row_that_is_out_of_date_is_found() -> None:
    made = runpy.run_path(str(SCRIPT))
    page = SCRIPT.with_name("errors.md").read_text(encoding="utf-8")
    assert made["updated"](page.replace("yes, the link goes on", "no")) == page
