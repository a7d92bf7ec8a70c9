"""How a link begins: introduction, live probe of the paths by both sides, confirmation.

The connecting side says ``Hello``; the listening side answers ``Welcome`` or ``Refuse``, with a secret both are sealed
(``wire.auth``). Each side then finds its own path to the other. ``Confirm`` and its ``Ok`` make the link live on both
sides; until then either can still say no and nothing is left behind.
"""

from __future__ import annotations

import functools
import secrets
from hmac import compare_digest
from typing import TYPE_CHECKING, Final, TypeVar

from llm_datadist.engine.admission import Newcomer, NotAdmittedError, introduce
from llm_datadist.engine.errors import LinkError
from llm_datadist.engine.link import Link, LinkState, LinkTerms
from llm_datadist.engine.link_failures import cannot_connect
from llm_datadist.engine.service import refuse
from llm_datadist.engine.session import Session
from llm_datadist.net.address import text
from llm_datadist.net.channel import Channel, ChannelClosedError, ReplyTimeoutError
from llm_datadist.net.dial import hear, send_first, tell
from llm_datadist.net.security import TlsError, peer_host
from llm_datadist.net.waiting import share_of_descriptors
from llm_datadist.paths.base import ConnectionLostError, Context, PathError, PathTimeoutError, Peer, PeerGoneError
from llm_datadist.paths.ladder import Route
from llm_datadist.paths.tcp_server import MAX_CONNECTIONS
from llm_datadist.status import LLMStatusCode, code_2_status
from llm_datadist.utils import limits, log
from llm_datadist.utils.deadline import Deadline
from llm_datadist.wire import messages
from llm_datadist.wire.auth import NO_KEY, handover_request
from llm_datadist.wire.data import ANSWER_BYTES, Greeting
from llm_datadist.wire.framing import Kind, ProtocolError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from llm_datadist.engine.comms import Comms
    from llm_datadist.engine.core import Core
    from llm_datadist.net.address import Address
    from llm_datadist.paths.base import DataConnector

T = TypeVar("T")
_MAX_LINK_S: Final = 60.0
_PING_S: Final = 0.5
_PREFETCH_S: Final = 1.0
_MAX_PENDING: Final = 512
_REVERSE_S: Final = 5.0


class Handshaker:
    """Makes links, as the connecting and as the listening side."""

    def __init__(self, core: Core, comms: Comms) -> None:
        self._core = core
        self._comms = comms
        self._pending = core.pending
        self._most_pending = share_of_descriptors(_MAX_PENDING)

    # The connecting side

    def dial(self, address: Address, cluster_id: int, deadline: Deadline, comm: str | None = None) -> Link:
        """Link the peer that listens at ``address``.

        Raises:
            LinkError: with the status and the reason.
        """
        return self._call(
            address, deadline, lambda session: self._introduce(session, address, cluster_id, deadline, comm)
        )

    def visit(self, address: Address, deadline: Deadline, stay_s: float) -> tuple[Link, Context]:
        """Introduce this side to the peer that listens at ``address``, but make no link of it.

        What is returned is what paths need. ``LinkEnder.agree`` ends it; after ``stay_s`` the peer ends it by itself.

        Raises:
            LinkError: as for ``dial``.
        """

        def meet(session: Session) -> tuple[Link, Context]:
            link = self._meet(session, address, deadline, stay_s)
            return link, self._context(link, functools.partial(self._open_forward, link, address))

        return self._call(address, deadline, meet)

    def _call(self, address: Address, deadline: Deadline, then: Callable[[Session], T]) -> T:
        """Connect, and go on with ``then``; if that fails, nothing is left behind."""
        try:
            sock = self._core.admission.dial(address, Kind.CONTROL, deadline)
        except (NotAdmittedError, TlsError) as error:
            message = f"no link to {text(address)}: {error}"
            raise LinkError(LLMStatusCode.LLM_LINK_FAILED, message) from error
        except ValueError as error:
            raise LinkError(LLMStatusCode.LLM_PARAM_INVALID, str(error)) from error
        except OSError as error:
            late = isinstance(error, TimeoutError) or deadline.expired()
            raise cannot_connect(error, text(address), late=late) from error
        session = Session(Channel(sock, self._core.loop), self._core, self)
        session.channel.start()
        try:
            return then(session)
        except BaseException as error:
            session.give_up(f"link given up: {error}")
            if isinstance(error, ChannelClosedError):
                hint = "see whether it is an LLMDataDist that listens there, of a fitting version, and still runs"
                raise LinkError(
                    LLMStatusCode.LLM_LINK_FAILED, f"{text(address)}: {error}", retryable=True, hint=hint
                ) from error
            if isinstance(error, (NotAdmittedError, ProtocolError)):
                raise LinkError(LLMStatusCode.LLM_LINK_FAILED, f"{text(address)}: {error}") from error
            if isinstance(error, ReplyTimeoutError):
                hint = (
                    "somebody listens there, but does not answer: see whether it is an LLMDataDist, and not stalled"
                    " (ps -o stat,pid,args shows T for one that is stopped: kill -CONT PID)"
                )
                raise LinkError(
                    LLMStatusCode.LLM_TIMEOUT, f"{text(address)}: {error}", retryable=True, hint=hint
                ) from error
            raise

    def _meet(
        self, session: Session, address: Address, deadline: Deadline, stay_s: float, comm: str | None = None
    ) -> Link:
        """Both sides introduce themselves; the peer waits for ``stay_s`` for what comes then."""
        core = self._core
        hello = messages.Hello(
            versions=(messages.VERSION_MIN, messages.VERSION_MAX),
            identity=core.identity,
            remote_accessible=core.options.remote_accessible,
            timeout_ms=max(1, int(stay_s * 1000)),
            offer=core.offer,
            comm=comm,
        )
        answer, key = introduce(session.channel, core.admission.secret, hello, deadline)
        welcome = _agreed(answer, messages.Welcome)
        peer = Peer(welcome.identity, welcome.offer)
        terms = LinkTerms.of(core.options, welcome.version, secret=key != NO_KEY)
        link = Link(peer, session.channel, welcome.link_token, text(address), terms)
        link.key = key
        link.dialled = address
        session.introduce(link)
        return link

    def _introduce(
        self, session: Session, address: Address, cluster_id: int, deadline: Deadline, comm: str | None
    ) -> Link:
        core = self._core
        link = self._meet(session, address, deadline, deadline.remaining(), comm)
        if link.cluster_id != cluster_id:
            log.warn(
                "the peer at %s is cluster %d, not %d: use its own id to transfer",
                link.address,
                link.cluster_id,
                cluster_id,
            )
        path = self._find_path(link, functools.partial(self._open_forward, link, address), deadline)
        if core.options.remote_accessible:
            link.catalogue(deadline)
        _agreed(session.channel.request(messages.Confirm(path=path), deadline), messages.Ok)
        if not self._install(link):
            raise LinkError(LLMStatusCode.LLM_ALREADY_LINK, "the peer has linked this side meanwhile")
        return link

    def _context(self, link: Link, open_data: DataConnector) -> Context:
        core = self._core
        return Context(
            identity=core.identity,
            regions=core.regions,
            copiers=core.copiers,
            copy_threads=core.copy_threads,
            open_data=open_data,
            fence=functools.partial(_fence, link),
            token=handover_request(link.key, link.token),
            ask=functools.partial(_ask, link),
            linger=link.linger,
            nixl=core.nixl,
        )

    def _find_path(self, link: Link, open_data: DataConnector, deadline: Deadline) -> str:
        route = Route(self._core.options.paths, link.peer, self._context(link, open_data))
        link.use(route)
        try:
            return route.connect(deadline).name
        except PathError as error:
            hint = "see LLMConfig.paths on both sides, and what is said of each path"
            late = isinstance(error, PathTimeoutError)
            code = LLMStatusCode.LLM_TIMEOUT if late else LLMStatusCode.LLM_LINK_FAILED
            raise LinkError(code, str(error), retryable=late, hint=hint) from error

    def _open_forward(
        self, link: Link, address: Address, count: int, deadline: Deadline
    ) -> list[tuple[int, socket.socket]]:
        """Data connections on which this side asks, opened by this side."""
        opened: list[tuple[int, socket.socket]] = []
        try:
            while len(opened) < count:
                opened.append(self._open_one(link, address, deadline, serve=True))
        except BaseException:
            for _, sock in opened:
                sock.close()
            raise
        return opened

    def _open_one(self, link: Link, address: Address, deadline: Deadline, *, serve: bool) -> tuple[int, socket.socket]:
        number = next(link.data_numbers)
        greeting = Greeting.make(link.key, link.token, number, serve=serve)
        try:
            sock = self._core.admission.dial(address, Kind.DATA, deadline)
            try:
                tell(sock, greeting.encode(), deadline)
                if not compare_digest(hear(sock, ANSWER_BYTES, deadline), greeting.answer(link.key)):
                    message = f"who answers at {text(address)} is not the linked peer"
                    raise PathError(message)
            except BaseException:
                sock.close()
                raise
        except (OSError, EOFError, TlsError, NotAdmittedError) as error:
            message = f"cannot connect to {text(address)}: {limits.with_hint(error)}"
            raise _not_opened(message, deadline) from error
        return number, sock

    def open_data(self, link: Link, count: int) -> messages.Body:
        """See ``Host.open_data``: data connections on which the peer asks, opened by this side."""
        if link.dialled is None:
            return refuse(LLMStatusCode.LLM_LINK_FAILED, "the side that has connected opens data connections")
        deadline = Deadline.after(_MAX_LINK_S)
        if self._core.data_server.count(link.token) + count > MAX_CONNECTIONS:
            return refuse(LLMStatusCode.LLM_LINK_FAILED, f"a link has at most {MAX_CONNECTIONS} data connections")
        try:
            for _ in range(count):
                number, sock = self._open_one(link, link.dialled, deadline, serve=False)
                self._core.data_server.add(link.token, number, sock, link.cluster_id)
        except PathError as error:
            return refuse(LLMStatusCode.LLM_LINK_FAILED, str(error))
        return messages.Ok()

    def _install(self, link: Link) -> bool:
        """Make a link live; False if a link that crossed it is kept instead, and this one has to be retired.

        Where both sides link each other at once, both keep the link that the side with the higher identity has begun.

        Raises:
            LinkError: the link, or this engine, has ended meanwhile.
        """
        begun_by_first = (link.dialled is not None) == self._goes_first(link.peer.identity)
        loser = self._core.table.install(link, prefer_old=not begun_by_first)
        if loser is not None and loser is not link:
            self._core.ender.retire(loser)
        if link.channel.closed:
            self._core.ender.lose(link, "the peer closed the connection")
        return loser is not link

    def _goes_first(self, peer: messages.Identity) -> bool:
        ours = self._core.identity
        return (ours.cluster_id, ours.incarnation) > (peer.cluster_id, peer.incarnation)

    # The listening side

    def accept(self, sock: socket.socket) -> None:
        """A control connection arrived. Loop thread."""
        admission = self._core.admission
        newcomer = Newcomer(admission.secret, admission.objection(sock))
        session = Session(Channel(sock, self._core.loop), self._core, self, newcomer)
        session.expect_hello()
        session.channel.start()

    def accept_data(self, sock: socket.socket, greeting: Greeting) -> None:
        """A data connection arrived. Loop thread."""
        token = greeting.link_token
        link = self._pending.get(token) or next((live for live in self._core.table.all() if live.token == token), None)
        reason = self._core.admission.objection(sock)
        if reason is None and link is None:
            reason = "its link is not known here"
        elif reason is None and link is not None and not greeting.proves(link.key):
            reason = "it has not proved that it belongs to its link"
        elif reason is None and link is not None and not link.numbers_seen.accept(greeting.connection):
            reason = f"number {greeting.connection} has come already"
        if reason is not None or link is None:
            where = peer_host(sock)
            log.warn_rarely(f"data {where}", "a data connection from %s was dropped: %s", where, reason)
            sock.close()
            return
        try:
            send_first(sock, greeting.answer(link.key))
        except (OSError, TlsError) as error:
            log.info("a data connection of cluster %d was lost at once: %s", link.cluster_id, error)
            sock.close()
            return
        if greeting.serve:
            self._core.data_server.add(token, greeting.connection, sock, link.cluster_id)
        else:
            link.data_arrived(greeting.connection, sock)

    def welcome(self, session: Session, newcomer: Newcomer, hello: messages.Hello, request_id: int) -> None:
        """See ``Host.welcome``."""
        refusal = self._objection(session, hello)
        if refusal is not None:
            session.channel.reply(newcomer.answer(refusal)[0], request_id)
            session.channel.close(refusal.reason)
            return
        version = messages.agree_on_version(hello.versions)
        welcome = messages.Welcome(
            version=version or messages.VERSION_MAX,
            identity=self._core.identity,
            offer=self._core.offer,
            link_token=secrets.token_bytes(16),
        )
        answer, key = newcomer.answer(welcome)
        link = Link(
            Peer(hello.identity, hello.offer),
            session.channel,
            welcome.link_token,
            text(session.channel.remote_address),
            LinkTerms.of(self._core.options, welcome.version, secret=key != NO_KEY),
        )
        link.key = key
        link.pending_comm = hello.comm
        link.supersedes = session.supersedes
        link.deadline = Deadline.after(min(hello.timeout_ms / 1000, _MAX_LINK_S))
        self._await_confirmation(link)
        session.introduce(link)
        link.give_up = self._core.loop.call_later(link.deadline.remaining(), lambda: self._give_up(link))
        session.channel.reply(answer, request_id)

    def _await_confirmation(self, link: Link) -> None:
        """Keep a link that is half made; of too many the one that has waited longest is given up."""
        self._pending[link.token] = link
        for oldest in list(self._pending.values())[: -self._most_pending]:
            self._give_up(oldest, "too many links at once have not been confirmed")

    def _objection(self, session: Session, hello: messages.Hello) -> messages.Refuse | None:
        core = self._core
        if messages.agree_on_version(hello.versions) is None:
            ours = f"{messages.VERSION_MIN} to {messages.VERSION_MAX}"
            theirs = f"{hello.versions[0]} to {hello.versions[1]}"
            reason = f"protocol versions {theirs} and {ours} have none in common: upgrade the side with the older one"
            return refuse(LLMStatusCode.LLM_LINK_FAILED, reason)
        if hello.remote_accessible != core.options.remote_accessible:
            self._comms.refused(hello.comm, hello.identity.cluster_id, "enable_remote_cache_accessible differs")
            reason = (
                f"enable_remote_cache_accessible is {hello.remote_accessible} at cluster "
                f"{hello.identity.cluster_id} and {core.options.remote_accessible} at cluster "
                f"{core.identity.cluster_id}: it must be the same on both sides"
            )
            return refuse(LLMStatusCode.LLM_PARAM_INVALID, reason)
        if hello.comm is not None and not self._comms.expects(hello.comm, hello.identity.cluster_id):
            return refuse(LLMStatusCode.LLM_PROCESSING_LINK, f"link({hello.comm!r}) has not been called here yet")
        if hello.identity.incarnation == core.identity.incarnation:
            session.is_self = True
            return None
        return self._conflict(session, hello.identity)

    def _conflict(self, session: Session, peer: messages.Identity) -> messages.Refuse | None:
        """What is in the way of a new link to this peer: a live one, or an attempt of this side that goes first."""
        core = self._core
        existing = core.table.get(peer.cluster_id)
        if existing is not None:
            if existing.peer.identity.incarnation == peer.incarnation and _alive_at_peer(existing):
                return refuse(LLMStatusCode.LLM_ALREADY_LINK, "the clusters are linked already")
            session.supersedes = existing
        if core.table.attempting(peer.cluster_id) and self._goes_first(peer):
            return refuse(LLMStatusCode.LLM_PROCESSING_LINK, "both sides link each other just now")
        return None

    def confirm(self, session: Session, confirm: messages.Confirm, request_id: int) -> None:
        """See ``Host.confirm``."""
        link = session.link
        if link is None or link.deadline is None or link.token not in self._pending or link.confirming:
            session.channel.close("a confirmation that nobody waits for")
            return
        link.confirming = True
        log.info("cluster %d reaches us over %s", link.cluster_id, confirm.path)
        if session.is_self:
            self._settled(link)
            session.channel.reply(messages.Ok(), request_id)
            return
        try:
            self._find_path(link, functools.partial(_open_reverse, link), link.deadline)
            kept = self._install(link)
        except LinkError as error:
            session.channel.reply(refuse(error.code, f"the other direction: {error}"), request_id)
            session.channel.close(str(error))
            return
        self._settled(link)
        if not kept:
            session.channel.reply(refuse(LLMStatusCode.LLM_ALREADY_LINK, "the clusters are linked already"), request_id)
            self._core.ender.retire(link)
            return
        if link.pending_comm is not None:
            link.made_for_comm = True
            self._comms.joined(link.pending_comm, link)
        session.channel.reply(messages.Ok(), request_id)
        if self._core.options.remote_accessible:
            self._prefetch(link)

    def _prefetch(self, link: Link) -> None:
        try:
            link.catalogue(Deadline.after(_PREFETCH_S))
        except (ChannelClosedError, ReplyTimeoutError) as error:
            log.info("the catalogue of cluster %d is fetched later: %s", link.cluster_id, error)

    def _settled(self, link: Link) -> None:
        if link.give_up is not None:
            link.give_up.cancel()
        self._pending.pop(link.token, None)

    def _give_up(self, link: Link, reason: str = "the link was not confirmed in time") -> None:
        if self._pending.pop(link.token, None) is not None:
            link.channel.close(reason)

    def join(self, link: Link, comm: str) -> messages.Body:
        """See ``Host.join``."""
        if not self._comms.expects(comm, link.cluster_id):
            return refuse(LLMStatusCode.LLM_PROCESSING_LINK, f"link({comm!r}) has not been called here yet")
        self._comms.joined(comm, link)
        return messages.Ok()


def _agreed(reply: messages.Body, wanted: type[T]) -> T:
    if isinstance(reply, wanted):
        return reply
    if isinstance(reply, messages.Refuse):
        code = code_2_status(reply.code)
        retryable = code is LLMStatusCode.LLM_PROCESSING_LINK
        raise LinkError(code, f"refused by the peer: {reply.reason}", retryable=retryable)
    message = f"the peer answered with {type(reply).__name__}"
    raise LinkError(LLMStatusCode.LLM_FAILED, message)


def _alive_at_peer(link: Link) -> bool:
    try:
        return isinstance(link.request(messages.Ping(link_token=link.token), Deadline.after(_PING_S)), messages.Ok)
    except (ChannelClosedError, ReplyTimeoutError):
        return False


def _open_reverse(link: Link, count: int, deadline: Deadline) -> list[tuple[int, socket.socket]]:
    """Data connections on which this side asks, opened by the peer because only it can connect."""
    if link.state is LinkState.CONNECTING:  # somebody who is not to be trusted yet keeps a thread
        deadline = deadline.at_most(_REVERSE_S)
    try:
        reply = link.request(messages.OpenData(count=count), deadline)
    except (ChannelClosedError, ReplyTimeoutError) as error:
        message = f"the peer did not open data connections: {error}"
        raise _not_opened(message, deadline) from error
    reason = reply.reason if isinstance(reply, messages.Refuse) else "they did not arrive in time"
    taken = link.take_arrivals(count, deadline) if isinstance(reply, messages.Ok) else []
    if len(taken) < count:
        for _, sock in taken:
            sock.close()
        message = f"the peer did not open data connections: {reason}"
        raise _not_opened(message, deadline)
    return taken


def _not_opened(reason: str, deadline: Deadline) -> PathError:
    """The error for data connections that could not be opened: too late, or like one that breaks in use."""
    return PathTimeoutError(reason) if deadline.expired() else ConnectionLostError(reason)


def _ask(link: Link, body: messages.Body, deadline: Deadline) -> messages.Body:
    try:
        return link.request(body, deadline)
    except ChannelClosedError as error:
        raise PeerGoneError(str(error)) from error
    except ReplyTimeoutError as error:
        raise PathTimeoutError(str(error)) from error


def _fence(link: Link, numbers: list[int], deadline: Deadline) -> bool:
    try:
        return isinstance(link.request(messages.Fence(connections=numbers), deadline), messages.Ok)
    except (ChannelClosedError, ReplyTimeoutError):
        return False
