"""Objects on the fake engine, for the tests of ``LLMDataDist``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist import LLMDataDist, LLMStatusCode

if TYPE_CHECKING:
    from fake_engine import FakeEngine

FAILED = LLMStatusCode.LLM_FAILED
SUCCESS = LLMStatusCode.LLM_SUCCESS
MANAGED = {"llm.EnableCacheManager": "1"}
SEVERAL = {**MANAGED, "llm.AllowMultipleInstances": "1"}


class FakeOptions:
    """Takes any options whose values are str, as the real one does first."""

    parsed: dict[str, str]

    @classmethod
    def parse(cls, options: dict[str, str]) -> FakeOptions:
        if not all(isinstance(value, str) for value in options.values()):
            message = "only support str"
            raise TypeError(message)
        made = cls()
        made.parsed = dict(options)
        return made


def engine_of(datadist: LLMDataDist) -> FakeEngine:
    return datadist._engine  # type: ignore[return-value]
