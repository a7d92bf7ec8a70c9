"""One control connection: who is at the other end, and what it may ask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from llm_datadist.engine.admission import NotAdmittedError
from llm_datadist.engine.link import LinkState
from llm_datadist.engine.liveness import Watch
from llm_datadist.engine.service import Holds, refuse
from llm_datadist.status import LLMStatusCode
from llm_datadist.utils import log
from llm_datadist.wire import messages
from llm_datadist.wire.messages import Ok

if TYPE_CHECKING:
    from llm_datadist.engine.admission import Newcomer
    from llm_datadist.engine.core import Core
    from llm_datadist.engine.link import Link
    from llm_datadist.net.channel import Channel

_PATIENCE_S: Final = 10.0


class Host(Protocol):
    """What a session needs of the engine beyond its core. The first two may block and are run by workers."""

    def welcome(self, session: Session, newcomer: Newcomer, hello: messages.Hello, request_id: int) -> None:
        """Answer the ``Hello`` of a newcomer."""

    def confirm(self, session: Session, confirm: messages.Confirm, request_id: int) -> None:
        """Answer a ``Confirm``."""

    def open_data(self, link: Link, count: int) -> messages.Body:
        """Open data connections for the peer to ask on."""

    def join(self, link: Link, comm: str) -> messages.Body:
        """The peer wants to enter a rank-table link."""


class Session:
    """Dispatches the messages of one control connection. ``link`` is set once the peer has introduced itself."""

    def __init__(self, channel: Channel, core: Core, host: Host, newcomer: Newcomer | None = None) -> None:
        """``newcomer``: what the peer has shown so far, if it has connected."""
        self.channel = channel
        self.link: Link | None = None
        self.is_self = False
        """Whether the other end is this very engine (a link to itself)."""
        self._core = core
        self._host = host
        self._holds = Holds()
        self.supersedes: Link | None = None
        """A link to the same life of the peer that is dead at its end."""
        self.newcomer = newcomer
        self._heard = False
        """Whether it has introduced itself."""
        self._introduced = False
        self._watch: Watch | None = None
        core.sessions.add(self)
        channel.on_message = self._message
        channel.on_close = self._closed
        channel.on_over = self._over

    def expect_hello(self) -> None:
        """Close the connection if its peer does not introduce itself soon."""
        self._core.newcomers.enter(self, _PATIENCE_S)

    def introduce(self, link: Link) -> None:
        """The peer is known now."""
        self.channel.hold()  # its end will mean that our transfers over the link have ended
        self.link = link
        self.channel.trust()
        options = self._core.options
        self._watch = Watch(
            link,
            self._core.loop,
            self._core.identity,
            options.heartbeat_interval_ms / 1000,
            options.heartbeat_timeout_ms / 1000,
        )
        self._watch.start()

    def give_up(self, reason: str) -> None:
        """The handshake has failed on this side: leave nothing behind."""
        self.channel.close(reason)
        if self.link is not None:  # it may have become known after the connection was lost
            self._core.ender.lose(self.link, reason)

    def _message(self, channel: Channel, body: messages.Body, request_id: int) -> None:
        if self.newcomer is not None and not self._heard:
            self._hear(self.newcomer, body, request_id)
        elif self.link is None:
            channel.close(f"{type(body).__name__} before an introduction")
        elif isinstance(body, messages.Confirm):
            self._core.confirm_workers.run(
                lambda: self._host.confirm(self, body, request_id), lambda: channel.close("no thread for the handshake")
            )
        else:
            self._linked_message(self.link, body, request_id)

    def _hear(self, newcomer: Newcomer, body: messages.Body, request_id: int) -> None:
        """Until the peer has introduced itself and, if there is a secret, proved that it knows it."""
        try:
            answer = newcomer.hear(body)
        except NotAdmittedError as error:
            where = self.channel.remote_host
            log.warn_rarely(f"link {where}", "a link from %s was refused: %s", where, error)
            self.channel.reply(refuse(LLMStatusCode.LLM_LINK_FAILED, str(error)), request_id)
            self.channel.close(str(error))
            return
        if isinstance(answer, messages.Hello):
            self._heard = True
            self._core.newcomers.leave(self)
            refusal = refuse(LLMStatusCode.LLM_LINK_FAILED, "this side has no thread for the handshake (any more)")
            self._core.control_workers.run(
                lambda: self._host.welcome(self, newcomer, answer, request_id),
                lambda: self.channel.reply(newcomer.answer(refusal)[0], request_id),
            )
        else:
            self.channel.reply(answer, request_id)

    def _linked_message(self, link: Link, body: messages.Body, request_id: int) -> None:
        service, reply = self._core.service, self.channel.reply
        if isinstance(body, messages.Fetch):
            reply(service.fetch(), request_id)
        elif isinstance(body, messages.Lookup):
            reply(service.lookup(self._holds, body), request_id)
        elif isinstance(body, messages.Finish):
            answer = service.finish(self._holds, body)
            if request_id:
                reply(answer, request_id)
        elif isinstance(body, messages.Notify):
            reply(self._core.mailbox.put(link.cluster_id, body.message), request_id)
        elif isinstance(body, messages.Resolve):
            reply(service.resolve(body), request_id)
        elif isinstance(body, messages.Digest):
            self._core.digests.answer(link.token, body, lambda answer: reply(answer, request_id))
        else:
            self._link_message(link, body, request_id)

    def _link_message(self, link: Link, body: messages.Body, request_id: int) -> None:
        core, reply = self._core, self.channel.reply
        if isinstance(body, messages.Drain):
            link.when_idle(lambda: reply(Ok(), request_id))
        elif isinstance(body, messages.Ping):
            alive = link.token == body.link_token and link.state is LinkState.LINKED
            reply(Ok() if alive else refuse(LLMStatusCode.LLM_NOT_YET_LINK, "that link is not up"), request_id)
        elif isinstance(body, messages.Join):
            reply(self._host.join(link, body.comm), request_id)
        elif isinstance(body, messages.OpenData):
            refusal = refuse(LLMStatusCode.LLM_LINK_FAILED, "this side has no thread to open connections")
            core.control_workers.run(
                lambda: reply(self._host.open_data(link, body.count), request_id), lambda: reply(refusal, request_id)
            )
        elif isinstance(body, messages.AskAgent):
            refusal = refuse(LLMStatusCode.LLM_LINK_FAILED, "this side has no thread to make a NIXL agent")
            core.control_workers.run(
                lambda: reply(core.tell_agent(link, body), request_id), lambda: reply(refusal, request_id)
            )
        elif isinstance(body, messages.Fence):
            core.data_server.give_up(link.token, body.connections, lambda: reply(Ok(), request_id))
        elif isinstance(body, messages.Bye):
            self._bye(link, body, request_id)
        else:
            self.channel.close(f"unexpected message {type(body).__name__}")

    def _bye(self, link: Link, body: messages.Bye, request_id: int) -> None:
        """The peer ends the link: let running transfers finish, then tell it and drop our half."""
        if self.is_self:  # the other half of a link to ourselves does all the work
            self.channel.reply(Ok(), request_id)
            return
        log.info("cluster %d ends the link: %s", link.cluster_id, body.reason)
        link.peer_said_bye = True
        link.peer_is_idle = bool(request_id)
        link.advance(LinkState.CLOSING)

        def idle() -> None:
            self._core.data_server.give_up(link.token, None, done)

        def done() -> None:
            # Before the peer goes on: whoever hears from it that they are unlinked may link it again at once.
            self._core.table.remove(link, None)
            if request_id:
                self.channel.reply(Ok(), request_id)
            self._core.ender.leave(link, "the peer unlinked")

        link.when_idle(idle)

    def _closed(self, _channel: Channel, reason: str) -> None:
        self._core.newcomers.leave(self)
        self._core.sessions.discard(self)
        self._core.service.drop(self._holds)
        if self._watch is not None:
            self._watch.stop()
        if self.link is not None:
            self._core.ender.lose(self.link, reason)

    def _over(self) -> None:
        if self._watch is not None:
            self._watch.close()
        if self.link is not None:
            self._core.ender.faded(self.link)
