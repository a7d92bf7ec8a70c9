"""Faults that a simulation must find: each takes away something that an invariant rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

from llm_datadist.engine import handshake
from llm_datadist.engine.catalogue import Catalogue
from llm_datadist.engine.links import LinkTable
from llm_datadist.memory.regions import RegionTable

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


def _hide_only(self: Any, entry: Any, _deadline: Any) -> bool:
    entry.hidden = True
    self._regions.invalidate()
    return True


def _never_live(_self: Any, _link: Any, *, prefer_old: bool = False) -> None:
    del prefer_old


PLANTED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    # A failed write is not fenced: its bytes may come after the call has returned.
    "fence": lambda: mock.patch.object(handshake, "_fence", return_value=True),
    # Unregistering does not wait for requests that are being served.
    "lease": lambda: mock.patch.object(RegionTable, "wait_unused", return_value=True),
    # Unregistering does not wait for transfers of this process.
    "pin": lambda: mock.patch.object(Catalogue, "wait_unpinned_after_hiding", _hide_only),
    # Links are confirmed and never entered.
    "install": lambda: mock.patch.object(LinkTable, "install", _never_live),
}
