"""Tools for testing code that uses this library."""

from __future__ import annotations

from llm_datadist.testing.loopback import loopback

__all__ = ["loopback"]
