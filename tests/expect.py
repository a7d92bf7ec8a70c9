"""One way to write "this call fails exactly like that"."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from llm_datadist import LLMException, LLMStatusCode
from llm_datadist.status import EXCEPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable

PI = LLMStatusCode.LLM_PARAM_INVALID


def expect(failure: type[Exception] | LLMStatusCode, call: Callable[[], object], match: str | None = None) -> Exception:
    """Call, and check the exact exception type, or that of the exact status; give the exception back."""
    kind = EXCEPTIONS[failure] if isinstance(failure, LLMStatusCode) else failure
    with pytest.raises(kind, match=match) as caught:
        call()
    assert type(caught.value) is kind
    if isinstance(failure, LLMStatusCode):
        assert isinstance(caught.value, LLMException)
        assert caught.value.status_code is failure
    assert str(caught.value)
    return caught.value
