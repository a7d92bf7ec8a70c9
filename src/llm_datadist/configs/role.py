"""What a process is in a disaggregated server."""

from __future__ import annotations

from enum import IntEnum


class LLMRole(IntEnum):
    """What a process does with KV caches. Transfers work the same way in every role."""

    PROMPT = 1
    DECODER = 2
    MIX = 3

    def __str__(self) -> str:
        return f"LLMRole.{self.name}"

    def __format__(self, spec: str) -> str:
        return int.__format__(self, spec) if spec else str(self)
