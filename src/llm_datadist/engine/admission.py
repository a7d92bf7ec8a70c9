"""Who is let in: other hosts, the shared secret, TLS. Both sides of a connection ask here before they say anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_datadist.engine.errors import invalid
from llm_datadist.net.dial import dial
from llm_datadist.net.security import from_this_host, on_this_host, tls_of
from llm_datadist.wire import messages
from llm_datadist.wire.auth import NO_KEY, REMEDY, AuthError, Connecting, Listening
from llm_datadist.wire.framing import ProtocolError

if TYPE_CHECKING:
    import socket

    from llm_datadist.engine.options import EngineOptions
    from llm_datadist.net.address import Address
    from llm_datadist.net.channel import Channel
    from llm_datadist.net.tls import TlsContexts
    from llm_datadist.utils.deadline import Deadline
    from llm_datadist.utils.secret import Secret
    from llm_datadist.wire.framing import Kind
    from llm_datadist.wire.messages import Body, Hello

_REMEDY: Final = (
    "set one secret on both sides (LLMConfig.secret_file, LLM_DATADIST_SECRET_FILE), or certificates"
    " (LLMConfig.tls_cert, tls_key, tls_ca), or, in a network that you trust, LLMConfig.allow_insecure_remote = True"
    " (LLM_DATADIST_ALLOW_INSECURE_REMOTE=1) on both sides"
)
_SECRET_REMEDY: Final = f"set {REMEDY}, or none on either"
_ONLY_LISTENING: Final = f"the listening side has a secret, the connecting side has shown none: {_SECRET_REMEDY}"
_ONLY_CONNECTING: Final = f"the connecting side has a secret, the listening side has none: {_SECRET_REMEDY}"
_NO_TLS: Final = "the listening side uses TLS, the connecting side does not: set tls_cert, tls_key, tls_ca on both"


class NotAdmittedError(Exception):
    """No link with this peer; the text says why, and what would help."""


class Admission:
    """The rules of one engine."""

    def __init__(self, options: EngineOptions) -> None:
        """Load certificates.

        Raises:
            LLMException: LLM_PARAM_INVALID: they cannot be used.
        """
        self.secret: Secret | None = options.secret
        self._tls: TlsContexts | None = None
        self._open = options.allow_insecure_remote or options.secret is not None or options.tls is not None
        if options.tls is not None:
            from llm_datadist.net.tls import TlsContexts  # noqa: PLC0415 - loads ssl

            try:
                self._tls = TlsContexts(options.tls)
            except ValueError as error:
                raise invalid("init", str(error)) from error

    @property
    def tls(self) -> TlsContexts | None:
        """What listeners need for TLS."""
        return self._tls

    def dial(self, address: Address, kind: Kind, deadline: Deadline) -> socket.socket:
        """See ``net.dial.dial``; to another host only if the rules permit it.

        Raises:
            NotAdmittedError: they do not; nothing has been sent.
            TlsError, OSError, ValueError: as ``net.dial.dial``.
        """
        if not self._open and not on_this_host(address[0]):
            message = f"it is on another host, where a link needs protection: {_REMEDY}"
            raise NotAdmittedError(message)
        return dial(address, kind, deadline, self._tls)

    def objection(self, sock: socket.socket) -> str | None:
        """Why an accepted connection leads to no link; None if it may go on."""
        if not self._open and not from_this_host(sock):
            return f"it comes from another host, with which a link needs protection: {_REMEDY}"
        if self._tls is not None and tls_of(sock) is None:
            return _NO_TLS
        return None


class Newcomer:
    """What the peer of one accepted control connection has shown so far."""

    def __init__(self, secret: Secret | None, objection: str | None) -> None:
        self._secret = secret
        self._objection = objection
        self._auth: Listening | None = None

    def hear(self, body: Body) -> Hello | messages.Challenge:
        """What it says: its introduction, if it is one to be believed, or else what to answer first.

        Raises:
            NotAdmittedError: it is not let in.
        """
        if self._objection is not None:
            raise NotAdmittedError(self._objection)
        if isinstance(body, messages.Greet) and self._auth is None:
            if self._secret is None:
                raise NotAdmittedError(_ONLY_CONNECTING)
            self._auth = Listening(self._secret, body)
            return self._auth.challenge()
        if isinstance(body, messages.Sealed) and self._auth is not None:
            try:
                body = messages.decode(self._auth.hello(body)).body
            except (AuthError, ProtocolError) as error:
                raise NotAdmittedError(str(error)) from error
        elif isinstance(body, messages.Hello) and self._secret is not None:
            raise NotAdmittedError(_ONLY_LISTENING)
        if isinstance(body, messages.Hello):
            return body
        message = f"{type(body).__name__} before an introduction"
        raise NotAdmittedError(message)

    def answer(self, body: Body) -> tuple[Body, bytes]:
        """What to send as the answer to the introduction, and the key of the link."""
        if self._auth is None:
            return body, NO_KEY
        sealed = self._auth.answer(messages.encode(messages.Envelope(body=body)))
        return sealed, self._auth.link_key()


def introduce(channel: Channel, secret: Secret | None, hello: Hello, deadline: Deadline) -> tuple[Body, bytes]:
    """As the connecting side: the peer's answer to ``hello``, and the key of the link.

    With a secret, an answer that is not a refusal is the peer's own, and so is what it says about itself.

    Raises:
        NotAdmittedError: the peer does not know the secret.
        ChannelClosedError, ReplyTimeoutError, ProtocolError: as ``Channel.request``.
    """
    if secret is None:
        return channel.request(hello, deadline), NO_KEY
    auth = Connecting(secret)
    challenge = channel.request(auth.greet(), deadline)
    if not isinstance(challenge, messages.Challenge):
        return _refusal(challenge), NO_KEY
    sealed = channel.request(auth.hello(challenge, messages.encode(messages.Envelope(body=hello))), deadline)
    if not isinstance(sealed, messages.Sealed):
        return _refusal(sealed), NO_KEY
    try:
        answer = messages.decode(auth.answer(sealed)).body
    except AuthError as error:
        raise NotAdmittedError(str(error)) from error
    return answer, auth.link_key()


def _refusal(body: Body) -> messages.Refuse:
    if isinstance(body, messages.Refuse):
        return body
    message = f"the peer answered with {type(body).__name__} and has not proved that it knows the secret"
    raise NotAdmittedError(message)
