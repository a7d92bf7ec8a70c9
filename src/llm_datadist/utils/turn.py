"""Work that one thread does for many: the others wait for it, each no longer than until its own deadline."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Hashable

    from llm_datadist.utils.deadline import Deadline

_SLICE_S: Final = 0.5


class Turn:
    """What one at a time may do that waits for a peer. A lock would let the others wait as long as the peer likes.

    Who takes it has a ticket. To end it, also if ``take`` was not successful, first take the ticket out of ``taken``,
    and see to it that ``leave`` is called, too: Ctrl-C may come between any two steps of Python, but not within the one
    that takes it out.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # with an RLock: a signal handler may take it, too
        self.taken: set[Hashable] = set()

    def take(self, ticket: Hashable, deadline: Deadline) -> bool:
        """Wait until nobody has it with another ticket; whether that was so in time."""
        with self._changed:
            while self.taken - {ticket}:
                # In slices: who has ended it may have been interrupted before it could say so.
                if not self._changed.wait(min(deadline.remaining(), _SLICE_S)) and deadline.expired():
                    return False
            self.taken.add(ticket)
            return True

    def leave(self) -> None:
        """Let the others know that a ticket has been taken out."""
        with self._changed:
            self._changed.notify_all()
