"""What the C++ library calls: one engine behind plain arguments and integer statuses (docs/cpp.md)."""

from __future__ import annotations

from llm_datadist.native.engine import NativeEngine

__all__ = ["NativeEngine"]
