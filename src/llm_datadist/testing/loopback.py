"""Loopback mode: one process plays every cluster."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from llm_datadist.engine import loopback as switch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def loopback() -> Iterator[None]:
    """While this is active, an ``LLMDataDist`` that is initialised makes its links to itself.

    ``link_clusters`` and ``link`` succeed at once for every cluster id and any address, nothing listens, and a
    transfer to or from a linked cluster finds this process's own caches. Everything else (checks, statuses, bytes) is
    the real thing, so code that drives this library can be tested alone and in one process.

    Example::

        with llm_datadist.testing.loopback():
            datadist = LLMDataDist(LLMRole.DECODER, 1)
            datadist.init(config.generate_options())
    """
    switch.enter()
    try:
        yield
    finally:
        switch.leave()
