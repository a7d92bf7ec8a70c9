"""Both sides of a new link prove that they know one secret, which is never sent. Sans-I/O.

The connecting side says ``Greet``, the listening side ``Challenge``: a fresh nonce of each. Then the introductions,
``Hello`` and its answer, travel as ``Sealed``: the encoded message, and an HMAC-SHA256 over the role of its sender,
both nonces and every introduction so far. So nothing recorded is of use again, nothing sent by one side can be shown
to it as the other's, and no byte of an introduction can be altered. The connecting side proves itself first: a stranger
gets nothing with which a guess could be tried. What is sealed is not even parsed before its proof holds.

Both get a key of the link. Data connections and the hand-over of memory prove with it that they belong to the link: a
token that was overheard is of no use without it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING, Final

from llm_datadist.wire.messages import NONCE_BYTES, Challenge, Greet, Sealed

if TYPE_CHECKING:
    from llm_datadist.utils.secret import Secret

PROOF_BYTES: Final = 32
REMEDY: Final = (
    "the same secret on both sides (LLMConfig.secret_file or secret, LLM_DATADIST_SECRET_FILE or LLM_DATADIST_SECRET)"
)
NO_KEY: Final = b""
"""Key of a link without a secret: its proofs prove nothing, but are made and checked all the same."""
_CONNECTING: Final = b"llm-datadist 1 connecting side"
_LISTENING: Final = b"llm-datadist 1 listening side"
_LINK_KEY: Final = b"llm-datadist 1 link key"
_DATA: Final = b"llm-datadist 1 data connection"
_DATA_ANSWER: Final = b"llm-datadist 1 data connection answered"
_HANDOVER: Final = b"llm-datadist 1 hand-over"
_WINDOW: Final = 4096


class AuthError(Exception):
    """The other side does not know the secret, or what came is not what it has said."""


def _proof(key: bytes, label: bytes, *parts: bytes) -> bytes:
    """HMAC over parts that cannot be mistaken for others: each goes with its length."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in (label, *parts):
        mac.update(len(part).to_bytes(8, "little"))
        mac.update(part)
    return mac.digest()


class _Side:
    """What both sides keep: the secret, the nonces, the introductions."""

    def __init__(self, secret: Secret, nonce: bytes | None) -> None:
        self._secret = secret.reveal()
        self._nonce = nonce or secrets.token_bytes(NONCE_BYTES)
        self._transcript: list[bytes] = []

    def _seal(self, label: bytes, payload: bytes) -> Sealed:
        self._transcript.append(payload)
        return Sealed(payload=payload, proof=_proof(self._secret, label, *self._transcript))

    def _open(self, label: bytes, sealed: Sealed, whose: str) -> bytes:
        expected = _proof(self._secret, label, *self._transcript, sealed.payload)
        if not hmac.compare_digest(expected, sealed.proof):
            message = f"the {whose} side has not proved that it knows the secret: set {REMEDY}"
            raise AuthError(message)
        self._transcript.append(sealed.payload)
        return sealed.payload

    def link_key(self) -> bytes:
        """The key of the link, once both introductions have been made."""
        return _proof(self._secret, _LINK_KEY, *self._transcript)


class Connecting(_Side):
    """The side that connects. Call ``greet``, ``hello``, ``answer``, ``link_key``, in this order."""

    def __init__(self, secret: Secret, nonce: bytes | None = None) -> None:
        """``nonce`` is for tests; else it is fresh."""
        super().__init__(secret, nonce)

    def greet(self) -> Greet:
        """What to begin with."""
        return Greet(nonce=self._nonce)

    def hello(self, challenge: Challenge, payload: bytes) -> Sealed:
        """The own introduction, for the side that answered with ``challenge``."""
        self._transcript = [self._nonce, challenge.nonce]
        return self._seal(_CONNECTING, payload)

    def answer(self, sealed: Sealed) -> bytes:
        """The answer to the introduction.

        Raises:
            AuthError: the other side does not know the secret.
        """
        return self._open(_LISTENING, sealed, "listening")


class Listening(_Side):
    """The side that listens. Call ``challenge``, ``hello``, ``answer``, ``link_key``, in this order."""

    def __init__(self, secret: Secret, greet: Greet, nonce: bytes | None = None) -> None:
        """Of a peer that said ``greet``; ``nonce`` is for tests, else it is fresh."""
        super().__init__(secret, nonce)
        self._transcript = [greet.nonce, self._nonce]

    def challenge(self) -> Challenge:
        """What to answer with."""
        return Challenge(nonce=self._nonce)

    def hello(self, sealed: Sealed) -> bytes:
        """The introduction of the connecting side.

        Raises:
            AuthError: it does not know the secret.
        """
        return self._open(_CONNECTING, sealed, "connecting")

    def answer(self, payload: bytes) -> Sealed:
        """The answer to it."""
        return self._seal(_LISTENING, payload)


def data_proof(key: bytes, token: bytes, connection: int, *, serve: bool) -> bytes:
    """Proof of the side that opens a data connection, for its greeting."""
    return _proof(key, _DATA, token, connection.to_bytes(8, "little"), bytes([serve]))


def data_answer(key: bytes, token: bytes, connection: int, *, serve: bool) -> bytes:
    """Proof of the side that accepts one, its answer to the greeting."""
    return _proof(key, _DATA_ANSWER, token, connection.to_bytes(8, "little"), bytes([serve]))


def handover_request(key: bytes, token: bytes) -> bytes:
    """What to show for the descriptors of a link's peer: its token, and a proof."""
    return token + _proof(key, _HANDOVER, token)


class OnceOnly:
    """Accepts each number once, so that a greeting that is sent again is refused.

    Numbers come about in order. Of those that are far behind the highest one nobody knows any more whether they have
    come, so that they are refused, too.
    """

    def __init__(self) -> None:
        self._highest = -1
        self._seen = 0
        """Bit i: whether ``highest - i`` has come."""

    def accept(self, number: int) -> bool:
        """Whether it comes for the first time."""
        ahead = number - self._highest
        if ahead > 0:
            self._seen = (self._seen << min(ahead, _WINDOW) | 1) & ((1 << _WINDOW) - 1)
            self._highest = number
            return True
        if -ahead >= _WINDOW or self._seen >> -ahead & 1:
            return False
        self._seen |= 1 << -ahead
        return True
