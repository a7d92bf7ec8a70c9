"""Whether the peer of a link is still there: the end of its process, and its silence.

The end of a process is the end of its connections, unless a child that it has forked keeps them open; so where the
process can be seen its pidfd is watched, too. A process that is stopped, or a host that cannot be reached any more,
closes nothing: who has been silent for a while is asked for a sign of life, which the peer's loop thread gives, however
busy its interpreter is otherwise.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Final

from llm_datadist.engine.link import LinkState
from llm_datadist.net.loop import READ
from llm_datadist.utils import log
from llm_datadist.utils.process import OtherProcess
from llm_datadist.wire.messages import Ping

if TYPE_CHECKING:
    from llm_datadist.engine.link import Link
    from llm_datadist.net.loop import Loop, Timer
    from llm_datadist.wire.messages import Identity

_SUSPICIOUS: Final = 2
"""Silent intervals after which it is told: one ping has had a whole interval for its answer."""


class Watch:
    """Watches the peer of one link. All of it runs on the loop's thread.

    Silence is counted in intervals that this side's loop has seen pass, not in seconds: if it is this process that was
    stopped, nobody else is declared dead.
    """

    def __init__(self, link: Link, loop: Loop, ours: Identity, interval_s: float, timeout_s: float) -> None:
        self._link = link
        self._loop = loop
        self._interval_s = interval_s
        self._patience = math.ceil(timeout_s / interval_s) if interval_s else 0
        self._silent = 0
        self._heard_at = link.channel.heard_at
        self._timer: Timer | None = None
        self._process = _process(link.peer.identity, ours)

    def start(self) -> None:
        """Begin; any thread."""
        self._loop.call_soon(self._start)

    def _start(self) -> None:
        if self._link.channel.over:
            self.close()
            return
        if self._process is not None and self._process.fileno() >= 0:
            self._loop.watch(self._process, READ, lambda _events: self._ended())
        if self._patience:
            self._timer = self._loop.call_later(self._interval_s, self._tick)

    def stop(self) -> None:
        """Ask for no sign of life any more; the process is still watched."""
        self._patience = 0
        if self._timer is not None:
            self._timer.cancel()

    def close(self) -> None:
        """Watch nothing any more; idempotent."""
        self.stop()
        if self._process is not None:
            self._loop.unwatch(self._process)
            self._process.close()

    def _ended(self) -> None:
        channel = self._link.channel
        if self._process is not None:
            channel.close(f"the peer's process {self._process.pid} has ended")
        self.close()
        channel.abandon()

    def _tick(self) -> None:
        link, channel = self._link, self._link.channel
        if channel.closed or not self._patience:
            return
        if link.state is LinkState.CONNECTING:  # the handshake has its own deadline, and the peer may not know us yet
            self._silent = 0
        elif channel.heard_at != self._heard_at:
            self._heard_at, self._silent = channel.heard_at, 0
            if link.stalled is not None:
                log.warn("cluster %d answers again", link.cluster_id)
                link.stalled = None
        else:
            self._silent += 1
        unanswered = self._silent - 1
        if unanswered >= 1:
            why = "its process is stopped" if self._process and self._process.stopped() else "stalled or unreachable"
            link.stalled = f"no sign of life for {self._silent * self._interval_s:g} s ({why})"
        if unanswered >= self._patience:
            channel.close(link.stalled or "no sign of life")
            return
        if self._silent == _SUSPICIOUS:
            rest = (self._patience - unanswered) * self._interval_s
            log.warn("cluster %d (%s): %s; given up in %g s", link.cluster_id, link.address, link.stalled, rest)
        if self._silent:
            link.notify(Ping(link_token=link.token), answered=True)
        self._timer = self._loop.call_later(self._interval_s, self._tick)


def _process(theirs: Identity, ours: Identity) -> OtherProcess | None:
    """The peer's process, if it can be seen from here and is not this one."""
    here = bool(ours.boot_id) and (theirs.boot_id, theirs.pid_namespace) == (ours.boot_id, ours.pid_namespace)
    if not here or theirs.pid == os.getpid():
        return None
    try:
        return OtherProcess(theirs.pid, theirs.start_time)
    except (OSError, ValueError):  # it ends just now, or it is not what it says; the paths find out
        return None
