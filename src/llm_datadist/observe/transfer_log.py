"""One line of the log for each transfer and each request that is served, at level DEBUG."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.utils import log

if TYPE_CHECKING:
    from llm_datadist.observe.events import Served, Transfer


class TransferLog:
    """Writes them; in use where that level is on when an engine starts."""

    def transfer(self, event: Transfer) -> None:
        """See ``Observer.transfer``."""
        steps = ", ".join(f"{step.phase.value} {step.seconds * 1e3:.3f}" for step in event.steps)
        left = "".join(f", not over {each.path} ({each.reason.value})" for each in event.fallbacks)
        log.debug(
            "transfer %016x: %s, cluster %d, over %s%s: %s, %d bytes in %.3f ms (%s)",
            event.transfer_id,
            event.operation,
            event.peer,
            event.path or "no path",
            left,
            event.status,
            event.num_bytes,
            event.seconds * 1e3,
            steps,
        )

    def served(self, event: Served) -> None:
        """See ``Observer.served``."""
        log.debug(
            "transfer %016x: served a %s of cluster %d: %s, %d bytes in %.3f ms",
            event.transfer_id,
            event.operation,
            event.peer,
            event.status,
            event.num_bytes,
            event.seconds * 1e3,
        )
