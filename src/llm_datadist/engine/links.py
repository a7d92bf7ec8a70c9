"""All links of an engine: who is linked, how a link begins and how it ends."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Final

from llm_datadist.engine.errors import RELINK_HINT, LinkError, failure
from llm_datadist.engine.link import LinkState
from llm_datadist.engine.link_failures import LinkFailures
from llm_datadist.net.channel import ChannelClosedError, ReplyTimeoutError
from llm_datadist.status import LLMStatusCode
from llm_datadist.utils import log
from llm_datadist.utils.deadline import Deadline
from llm_datadist.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llm_datadist.engine.link import Link, PeerLink
    from llm_datadist.engine.requests import PeerAddress
    from llm_datadist.net.address import Address
    from llm_datadist.net.loop import Loop
    from llm_datadist.net.workers import Workers

    Dial = Callable[[Address, int, Deadline], Link]

_MAX_OBITUARIES: Final = 1024
_RETRY_S: Final = 0.05
_ABORT_S: Final = 0.5
_RETIRE_S: Final = 10.0


class LinkTable:
    """The live links, by cluster id. Thread-safe.

    A link whose connection was lost leaves the table at once; why it went is remembered for messages.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.changed: threading.Condition = threading.Condition(self._lock)
        self._links: dict[int, Link] = {}
        self._attempts: set[int] = set()
        self._lost: OrderedDict[int, str] = OrderedDict()
        self._closed = False

    def get(self, cluster_id: int) -> Link | None:
        """The live link to a cluster."""
        with self._lock:
            return self._links.get(cluster_id)

    def peek(self, cluster_id: int) -> PeerLink | None:
        """The link to a cluster, if there is one, in whatever state; takes no lock."""
        return self._links.get(cluster_id)

    def require(self, cluster_id: int, operation: str) -> PeerLink:
        """The live link to a cluster.

        Raises:
            LLMException: LLM_NOT_YET_LINK, with the reason why a former link ended.
        """
        with self._lock:
            link = self._links.get(cluster_id)
            if link is not None and link.state is LinkState.LINKED:
                return link
            lost = self._lost.get(cluster_id)
            known = sorted(self._links)
        if lost is not None:
            context, hint = f"the link to cluster {cluster_id} ended: {lost}", RELINK_HINT
        else:
            linked = ", ".join(map(str, known[:16])) or "none"
            context, hint = f"cluster {cluster_id} is not linked (linked: {linked})", "call link_clusters or link first"
        raise failure(
            LLMStatusCode.LLM_NOT_YET_LINK, operation, context, peer=cluster_id, phase="link", retryable=True, hint=hint
        )

    def all(self) -> list[Link]:
        """All live links."""
        with self._lock:
            return list(self._links.values())

    def install(self, link: Link, *, prefer_old: bool = False) -> Link | None:
        """Make a link the live one of its cluster; the one that has to go now, if any.

        An older one to the same life of the peer is either known to be superseded, or both sides have linked each
        other at once; then ``prefer_old`` says that the older one is the one that both sides keep.

        Raises:
            LinkError: the link has ended already, or this engine has.
        """
        with self._lock:
            if self._closed:
                message = "this engine has been finalized"
                raise LinkError(LLMStatusCode.LLM_FAILED, message)
            old = self._links.get(link.cluster_id)
            same_peer = old is not None and old.peer.identity.incarnation == link.peer.identity.incarnation
            if old is not None and same_peer and old is not link.supersedes and prefer_old:
                return link
            if not link.advance(LinkState.LINKED):
                message = "the connection ended during the handshake"
                raise LinkError(LLMStatusCode.LLM_LINK_FAILED, message)
            if old is not None and same_peer:
                link.initiated_here = link.initiated_here or old.initiated_here
                link.comms |= old.comms
            self._links[link.cluster_id] = link
            self._lost.pop(link.cluster_id, None)
            self.changed.notify_all()
            return old

    def close(self) -> None:
        """Let no link be installed any more."""
        with self._lock:
            self._closed = True

    def remove(self, link: Link, lost: str | None) -> bool:
        """Take a link out; ``lost`` says why, if nobody asked for it. False if it is not the live one."""
        with self._lock:
            if self._links.get(link.cluster_id) is not link:
                return False
            del self._links[link.cluster_id]
            if lost is not None:
                self._lost[link.cluster_id] = lost
                while len(self._lost) > _MAX_OBITUARIES:
                    self._lost.popitem(last=False)
            self.changed.notify_all()
            return True

    def lost(self, cluster_id: int) -> str | None:
        """Why the last link to a cluster was lost, if it was and has not been made again."""
        with self._lock:
            return self._lost.get(cluster_id)

    def forget(self, cluster_id: int) -> None:
        """Do not remember any more that a link was lost."""
        with self._lock:
            self._lost.pop(cluster_id, None)

    def begin(self, cluster_id: int, deadline: Deadline) -> Link | None:
        """Start an attempt to link a cluster, after other threads' attempts; the live link instead if there is one.

        Raises:
            LinkError: another thread's attempt took until the deadline.
        """
        with self._lock:
            if not self.changed.wait_for(lambda: cluster_id not in self._attempts, deadline.remaining()):
                message = "another thread is still linking this cluster"
                raise LinkError(LLMStatusCode.LLM_PROCESSING_LINK, message, retryable=True, hint="wait for it")
            link = self._links.get(cluster_id)
            if link is None:
                self._attempts.add(cluster_id)
            return link

    def end(self, cluster_id: int) -> None:
        """End the attempt."""
        with self._lock:
            self._attempts.discard(cluster_id)
            self.changed.notify_all()

    def attempting(self, cluster_id: int) -> bool:
        """Whether this side is just linking that cluster."""
        with self._lock:
            return cluster_id in self._attempts

    def wait_for_link(self, cluster_id: int, deadline: Deadline) -> Link | None:
        """The live link to a cluster, as soon as there is one."""
        with self._lock:
            self.changed.wait_for(lambda: cluster_id in self._links, deadline.remaining())
            return self._links.get(cluster_id)


class Linker:
    """``link_clusters`` and ``unlink_clusters``: several clusters at once, one status each."""

    def __init__(
        self, table: LinkTable, dial: Dial, end: LinkEnder, workers: Workers, *, hixl: bool, need_local: bool
    ) -> None:
        self._table = table
        self._dial = dial
        self._end = end
        self._workers = workers
        self._hixl = hixl
        self._need_local = need_local
        self.failures: LinkFailures = LinkFailures()

    def link(self, peers: Sequence[PeerAddress], timeout_ms: int) -> list[LLMStatusCode]:
        """Link all peers; failures are logged with their reason."""
        deadline = Deadline.after(timeout_ms / 1000)
        return self._each("link", peers, lambda peer: self._link_one(peer, deadline))

    def unlink(self, peers: Sequence[PeerAddress], timeout_ms: int, *, force: bool) -> list[LLMStatusCode]:
        """Unlink all peers; failures are logged with their reason."""
        deadline = Deadline.after(timeout_ms / 1000)
        return self._each("unlink", peers, lambda peer: self._unlink_one(peer, deadline, force=force))

    def _each(
        self, verb: str, peers: Sequence[PeerAddress], work: Callable[[PeerAddress], object]
    ) -> list[LLMStatusCode]:
        def guarded(peer: PeerAddress) -> LLMStatusCode:
            try:
                work(peer)
            except LinkError as error:
                self.failures.add(f"{verb}_clusters", peer, error)
                return error.code
            self.failures.forget(peer.cluster_id)
            return LLMStatusCode.LLM_SUCCESS

        if len(peers) == 1:
            return [guarded(peers[0])]
        try:
            return self._workers.each([functools.partial(guarded, peer) for peer in peers])
        except CancelledError:
            log.error("%s_clusters: this engine has been finalized meanwhile", verb)
            return [LLMStatusCode.LLM_FAILED] * len(peers)

    def _link_one(self, peer: PeerAddress, deadline: Deadline) -> None:
        if len(peer.remotes) != 1:
            message = f"exactly one remote address is needed, {len(peer.remotes)} given"
            raise LinkError(LLMStatusCode.LLM_PARAM_INVALID, message)
        if self._need_local and peer.num_locals != 1:
            message = f"without local_comm_res exactly one local address is needed, {peer.num_locals} given"
            raise LinkError(LLMStatusCode.LLM_PARAM_INVALID, message)
        link = self._table.begin(peer.cluster_id, deadline)
        if link is None:
            try:
                link = self._dial_until(peer, deadline)
            finally:
                self._table.end(peer.cluster_id)
            link.initiated_here = True
            return
        # With the hixl backend each side makes its own link; ours serves both.
        if not self._hixl or link.initiated_here:
            message = f"the clusters are linked already (with pid {link.peer.identity.pid} at {link.address})"
            hint = "use that link, or unlink first; two processes need two cluster ids"
            raise LinkError(LLMStatusCode.LLM_ALREADY_LINK, message, hint=hint)
        link.initiated_here = True

    def _dial_until(self, peer: PeerAddress, deadline: Deadline) -> Link:
        """Dial; where both sides link each other at once, one connection survives and serves both."""
        while True:
            try:
                return self._dial(peer.remotes[0], peer.cluster_id, deadline)
            except LinkError as error:
                crossed = error.code in (LLMStatusCode.LLM_PROCESSING_LINK, LLMStatusCode.LLM_ALREADY_LINK)
                wait = deadline.at_most(_RETRY_S) if crossed else deadline.at_most(0)
                link = self._table.wait_for_link(peer.cluster_id, wait)
                if link is not None:
                    return link
                if not crossed or deadline.expired():
                    raise

    def _unlink_one(self, peer: PeerAddress, deadline: Deadline, *, force: bool) -> None:
        if not force and not self._hixl and len(peer.remotes) != 1:
            message = f"without force exactly one remote address is needed, {len(peer.remotes)} given"
            raise LinkError(LLMStatusCode.LLM_PARAM_INVALID, message)
        link = self._table.get(peer.cluster_id)
        if link is None:
            lost = self._table.lost(peer.cluster_id)
            if lost is None or force or self._hixl:
                self._table.forget(peer.cluster_id)
                return
            message = f"the peer cannot be told, the link was lost ({lost})"
            raise LinkError(LLMStatusCode.LLM_UNLINK_FAILED, message, hint="use force=True")
        if force:
            self._end.force(link, deadline)
        else:
            self._end.agree(link, deadline)


class LinkEnder:
    """The ways in which a link ends."""

    def __init__(
        self,
        table: LinkTable,
        loop: Loop,
        release: Callable[[Link], object],
        reached_by: Callable[[Link], bool],
    ) -> None:
        """``reached_by`` tells whether a peer may reach the memory of this process without its doing."""
        self._table = table
        self._loop = loop
        self._release = release
        self._reached_by = reached_by
        self._lock = threading.Lock()
        self._fading: set[Link] = set()
        self._hanging: set[Link] = set()
        """Links whose connection is kept until the peer hangs up, although it may not copy any more."""
        self._closed = False

    def agree(self, link: Link, deadline: Deadline) -> None:
        """End it in good order: running transfers of both sides finish, the peer drops its half, then it is gone.

        Raises:
            LinkError: LLM_TIMEOUT or LLM_UNLINK_FAILED; the link is kept.
        """
        if not link.advance(LinkState.CLOSING):
            return
        if not link.wait_idle(deadline):
            link.resume()
            message = "transfers over the link did not end in time"
            raise LinkError(LLMStatusCode.LLM_TIMEOUT, message, retryable=True, hint="try again, or use force=True")
        try:
            link.request(messages.Bye(reason="unlinked"), deadline)
        except ReplyTimeoutError as error:
            link.resume()
            message, hint = "the peer did not answer in time", "use force=True to end the link on this side alone"
            raise LinkError(LLMStatusCode.LLM_TIMEOUT, message, retryable=True, hint=hint) from error
        except ChannelClosedError as error:
            if not link.peer_said_bye:
                message = f"the peer could not be told: {error}"
                raise LinkError(LLMStatusCode.LLM_UNLINK_FAILED, message, hint="use force=True") from error
        self.drop(link, "unlinked")
        # The peer may have closed the connection before this thread got here; that was no loss.
        self._table.forget(link.cluster_id)

    def end(self, link: Link, deadline: Deadline) -> None:
        """End it in good order if that works by the deadline, else on this side alone."""
        try:
            self.agree(link, deadline)
        except LinkError as error:
            log.warn("cluster %d is unlinked on this side alone: %s", link.cluster_id, error)
            self.force(link, deadline)

    def force(self, link: Link, deadline: Deadline) -> None:
        """End this side; the peer is told, but not waited for. Running transfers may finish until the deadline.

        The peer is told after that: it gives up its end of the data connections, and what was under way to it would
        fail without anybody knowing how far it came.
        """
        link.advance(LinkState.CLOSING)
        if not link.wait_idle(deadline):
            link.abort_transfers()
            link.wait_idle(Deadline.after(_ABORT_S))
        link.notify(messages.Bye(reason="unlinked by force"))
        self._fade(link, "unlinked by force")

    def retire(self, link: Link) -> None:
        """It has been replaced: running transfers of both sides finish, then it ends. Does not block."""
        link.advance(LinkState.CLOSING)
        link.when_idle(lambda: link.notify(messages.Bye(reason="replaced by another link of the same two clusters")))
        self._fade(link, "replaced")

    def _fade(self, link: Link, reason: str) -> None:
        """Over on this side; the connection stays until the peer, whose transfers may still run, closes it."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._fading.add(link)
        if closed:
            self.drop(link, reason)
            return
        self._table.remove(link, None)
        link.advance(LinkState.CLOSING)
        link.when_idle(link.release)
        link.fade = self._loop.call_later(_RETIRE_S, lambda: link.channel.close(reason))
        if link.channel.over:
            self.faded(link)

    def faded(self, link: Link) -> None:
        """Its connection has gone: its peer does not copy any more."""
        self._copies_no_more(link)
        with self._lock:
            self._hanging.discard(link)

    def _copies_no_more(self, link: Link) -> None:
        if link.fade is not None:
            link.fade.cancel()
        with self._lock:
            self._fading.discard(link)

    def fading(self) -> list[Link]:
        """Links that have ended here, but whose peers may still be copying."""
        with self._lock:
            return list(self._fading)

    def lose(self, link: Link, reason: str) -> None:
        """Its connection is gone and nobody asked for that. Does not block.

        If this side has given it up, the peer may be in the middle of a copy and find that out only when it wakes up.
        """
        was_linked = link.state is LinkState.LINKED
        with self._lock:
            waits = was_linked or link in self._fading
        if not (waits and self._await_peer(link)):
            self._copies_no_more(link)
        self._table.remove(link, None if link.peer_said_bye else reason)
        link.advance(LinkState.CLOSING)
        if was_linked and not link.peer_said_bye:
            log.warn("link to cluster %d (%s) lost: %s", link.cluster_id, link.address, reason)
        self._finish(link, reason)

    def give_up(self, link: Link, reason: str) -> None:
        """End it at once although the peer has not said that its transfers have ended. Does not block."""
        if self._reached_by(link) and not link.channel.over and not link.peer_is_idle:
            who = f"cluster {link.cluster_id} (pid {link.peer.identity.pid})"
            log.error("%s has not confirmed that it copies no more: keep registered memory mapped until it ends", who)
        self.drop(link, reason)

    def close(self) -> None:
        """Wait for no peer any more; the engine ends."""
        with self._lock:
            self._closed = True
            hanging = list(self._hanging)
        for link in self.fading():
            self.give_up(link, "finalized")
            link.channel.abandon()
        for link in hanging:
            link.channel.abandon()

    def _await_peer(self, link: Link) -> bool:
        """Keep its connection until the peer closes it, if the peer may copy until then; whether that is so."""
        if link.channel.over or link.peer_is_idle or not self._reached_by(link):
            return False
        with self._lock:
            if not self._closed:
                self._fading.add(link)
            return not self._closed

    def leave(self, link: Link, reason: str) -> None:
        """The peer has ended it. Does not block. By force it does so even if a copy of its own is stuck."""
        self._await_peer(link)
        self.drop(link, reason)

    def drop(self, link: Link, reason: str) -> None:
        """End it at once on this side. Does not block."""
        self._table.remove(link, None)
        link.advance(LinkState.CLOSING)
        self._finish(link, reason)

    def _finish(self, link: Link, reason: str) -> None:
        link.channel.close(reason)
        link.abort_transfers()
        link.when_idle(lambda: self._last(link))

    def _last(self, link: Link) -> None:
        if link.advance(LinkState.CLOSED):
            link.release()
            self._release(link)
            with self._lock:
                waits = link in self._fading and not self._closed
                if waits:
                    self._hanging.add(link)
            link.channel.hang_up(wait=waits)
