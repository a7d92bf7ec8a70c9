"""How the KV of a request gets from a prefill to a decode engine."""

from __future__ import annotations

from enum import Enum


class Mode(str, Enum):
    """As the engines' connectors have it; they must agree."""

    PUSH = "push"
    PULL = "pull"
