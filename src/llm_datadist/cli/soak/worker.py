"""One process of a soak: carries out orders, each in a thread of its own, until the parent is gone or says no more."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from llm_datadist import LLMException
from llm_datadist.cli.soak.member import Member
from llm_datadist.cli.soak.orders import (
    Link,
    Move,
    Numbered,
    Refused,
    Register,
    Start,
    SwitchRole,
    Unlink,
    Verify,
)
from llm_datadist.utils.log import LOGGER_NAME

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from llm_datadist.cli.soak.orders import Answer, Order
    from llm_datadist.cli.soak.plan import Place

_THREADS: Final = 16
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_LARGE_BYTES: Final = 256 << 10


def serve(parent: Connection) -> None:
    """Carry out orders."""
    _give_memory_back()
    threading.Thread(target=_end_with_parent, name="watch-parent", daemon=True).start()
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.CRITICAL)  # what goes wrong on purpose is no news; what should not is told by the parent
    logging.getLogger(LOGGER_NAME).addHandler(handler)
    crew = Crew()
    answering = threading.Lock()

    def carry_out(numbered: Numbered) -> None:
        answer = crew.answer(numbered)
        with answering, contextlib.suppress(OSError):
            parent.send(answer)

    with ThreadPoolExecutor(_THREADS) as pool, contextlib.suppress(EOFError, OSError):
        while (numbered := parent.recv()) is not None:
            pool.submit(carry_out, numbered)
    crew.close()


def _give_memory_back() -> None:
    """Let large arrays that verification needs for a moment go back to the system at once: what stays is a leak."""
    with contextlib.suppress(AttributeError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


class Crew:
    """The members of one process."""

    def __init__(self) -> None:
        self._members: dict[Place, Member] = {}

    def answer(self, numbered: Numbered) -> Numbered:
        """What becomes of an order."""
        try:
            order = numbered.content
            return Numbered(numbered.number, self._carry_out(order))  # type: ignore[arg-type]
        except LLMException as error:
            status = error.status_code.name if error.status_code is not None else "no status"
            return Numbered(numbered.number, Refused(status, str(error)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent must learn of it
            return Numbered(numbered.number, None, crash=f"{type(error).__name__}: {error}")

    def _carry_out(self, order: Order) -> Answer:
        if isinstance(order, Start):
            member = self._members[order.place] = Member(order.place, order.seed)
            return member.ready()
        if isinstance(order, Move):
            return self._members[order.transfer.actor].move(order)
        if isinstance(order, Verify):
            return self._members[order.transfer.target].verify(order)
        return _change(self._members[order.place], order)

    def close(self) -> None:
        """Finalize all."""
        for member in self._members.values():
            member.close()


def _change(member: Member, order: Register | Link | Unlink | SwitchRole) -> Answer:
    if isinstance(order, Register):
        return member.register(order.seed)
    if isinstance(order, Link):
        return member.link(order.peers)
    if isinstance(order, Unlink):
        return member.unlink(order.peers, force=order.force)
    return member.switch_role()
