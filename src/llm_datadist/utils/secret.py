"""A shared secret that nothing shows: neither ``repr`` nor a log, an exception or a pickle."""

from __future__ import annotations

import os
import stat
from typing import Final, NoReturn

from llm_datadist.utils import log

MIN_BYTES: Final = 16
"""Who records a link can try guesses without asking anybody, so that a short secret is none."""
MAX_BYTES: Final = 4096


class Secret:
    """Bytes that both sides of a link know."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        """Keep it.

        Raises:
            ValueError: too short to be a secret, or too long; the text does not tell it.
        """
        if not MIN_BYTES <= len(key) <= MAX_BYTES:
            remedy = "make one with 'openssl rand -hex 32'"
            message = f"it has {len(key)} bytes, a secret has {MIN_BYTES} to {MAX_BYTES}: {remedy}"
            raise ValueError(message)
        self._key = key

    @classmethod
    def from_file(cls, path: str) -> Secret:
        """The content of a file, without line ends after it.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no regular file, or holds no secret.
        """
        with open(path, "rb", opener=_without_waiting) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                message = "it is no regular file"
                raise ValueError(message)
            if mode & stat.S_IROTH:
                log.warn("every user of this host can read the secret in %s: chmod 600", path)
            return cls(file.read(MAX_BYTES + 3).rstrip(b"\r\n"))

    def reveal(self) -> bytes:
        """The bytes; for the handshake alone."""
        return self._key

    def __repr__(self) -> str:
        return "Secret(hidden)"

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def __reduce__(self) -> NoReturn:
        message = "a Secret is not pickled"
        raise TypeError(message)


def _without_waiting(path: str, flags: int) -> int:
    """Open it at once, also if it is a pipe to which nobody writes."""
    return os.open(path, flags | os.O_NONBLOCK)
