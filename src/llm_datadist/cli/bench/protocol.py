"""What the driver, a contestant and its owner process say to each other: JSON lines over pipes, every wait bounded."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypeVar

import msgspec

from llm_datadist.cli.bench.results import Case  # noqa: TC001 - msgspec looks at the annotations

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import IO

_Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
_NotNegative: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
_MAX_LINE: Final = 64 << 20
_CHUNK: Final = 1 << 20
_EPITAPH_S: Final = 2.0


class Hello(msgspec.Struct, tag=True):
    """First thing a process says: it has started, a contestant in a process group of its own."""


class Prepare(msgspec.Struct, tag=True):
    """Driver: get memory for this case and connect both processes. Answer: ``Done``."""

    case: Case
    seed: int


class Run(msgspec.Struct, tag=True):
    """Driver: move the whole case once to warm up, then once by the clock. Answer: ``Ran``."""


class Verify(msgspec.Struct, tag=True):
    """Driver: fill the source with a pattern, poison the destination, move, compare all. Answer: ``Verified``."""

    seed: int


class Time(msgspec.Struct, tag=True):
    """Driver: move the whole case so many times, each by the clock. Answer: ``Timed``."""

    calls: int


class Offer(msgspec.Struct, tag=True):
    """Owner: where its memory is, and what else a contestant must know to get there."""

    pid: int
    addresses: list[int]
    extra: dict[str, Any]


class Fill(msgspec.Struct, tag=True):
    """To the owner: write the pattern. Answer: ``Done``."""

    seed: int


class Poison(msgspec.Struct, tag=True):
    """To the owner: overwrite the destination. Answer: ``Done``."""


class Check(msgspec.Struct, tag=True):
    """To the owner: compare with the pattern what arrived. Answer: ``Verified``."""

    seed: int


class Stop(msgspec.Struct, tag=True):
    """To both: end. Not answered."""


class Done(msgspec.Struct, tag=True):
    """Nothing more to say."""


class Ran(msgspec.Struct, tag=True):
    """One move of the whole case."""

    seconds: _Positive
    cpu_seconds: _NotNegative
    """User and system, both processes."""


class Timed(msgspec.Struct, tag=True):
    """Many moves."""

    seconds: list[_Positive]


class Verified(msgspec.Struct, tag=True):
    """What comparing every byte found."""

    compared: int
    wrong: int


class Failed(msgspec.Struct, tag=True):
    """The order could not be carried out."""

    reason: str


Message: TypeAlias = (
    Hello
    | Prepare
    | Run
    | Verify
    | Time
    | Offer
    | Fill
    | Poison
    | Check
    | Stop
    | Done
    | Ran
    | Timed
    | Verified
    | Failed
)
T = TypeVar("T")
_DECODER: Final = msgspec.json.Decoder(Message)


class ChildError(Exception):
    """A process failed, ended, kept silent for too long or said what it must not."""


class Lines:
    """Messages as JSON lines over a pair of file descriptors, which must outlive it."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading = reading
        self._writing = writing
        self._buffer = bytearray()
        self._poll = select.poll()
        self._poll.register(reading, select.POLLIN)

    def send(self, message: Message) -> None:
        """Write one message.

        Raises:
            OSError: the other end is gone.
        """
        data = memoryview(msgspec.json.encode(message) + b"\n")
        while data:
            data = data[os.write(self._writing, data) :]

    def ready(self, timeout_s: float) -> bool:
        """Whether there is something to read, or the end, within this time."""
        return b"\n" in self._buffer or bool(self._poll.poll(max(0.0, timeout_s) * 1000))

    def receive(self, timeout_s: float) -> Message:
        """The next message.

        Raises:
            EOFError: the other end is gone.
            TimeoutError: nothing came in time.
            msgspec.DecodeError: it is no message.
        """
        end = time.monotonic() + timeout_s
        while (stop := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > _MAX_LINE:
                message = f"a line of more than {_MAX_LINE} bytes"
                raise msgspec.DecodeError(message)
            if not self.ready(end - time.monotonic()):
                raise TimeoutError
            data = os.read(self._reading, _CHUNK)
            if not data:
                raise EOFError
            self._buffer += data
        line = bytes(self._buffer[:stop])
        del self._buffer[: stop + 1]
        heard: Message = _DECODER.decode(line)
        return heard


class Child:
    """A process that carries out orders."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        errors: IO[bytes] | None = None,
    ) -> None:
        """Start it; it inherits the environment and gets ``environment`` on top.

        Args:
            name: for error messages.
            command: program and arguments.
            environment: variables to set.
            errors: file for its standard error, quoted when it fails; None: that of this process.

        Raises:
            ChildError: the system refuses.
        """
        self.name = name
        self._errors = errors
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the caller names the program
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(environment or {})},
            )
        except OSError as error:
            message = f"{name}: cannot start {command[0]}: {error.strerror}"
            raise ChildError(message) from error
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise AssertionError
        self._streams = (stdin, stdout)
        self._lines = Lines(stdout.fileno(), stdin.fileno())

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def ask(self, order: Message, answer: type[T], timeout_s: float) -> T:
        """Give an order and wait for the answer.

        Raises:
            ChildError: another answer, or none in time.
        """
        self.tell(order)
        return self.hear(answer, timeout_s)

    def tell(self, order: Message) -> None:
        """Give an order.

        Raises:
            ChildError: it is gone.
        """
        try:
            self._lines.send(order)
        except OSError as error:
            raise ChildError(self._epitaph()) from error

    def hear(self, answer: type[T], timeout_s: float) -> T:
        """Wait for an answer of this type.

        Raises:
            ChildError: another answer, or none in time.
        """
        try:
            heard = self._lines.receive(timeout_s)
        except EOFError as error:
            raise ChildError(self._epitaph()) from error
        except TimeoutError as error:
            message = f"{self.name}: no answer within {timeout_s:g} s{self._last_words()}"
            raise ChildError(message) from error
        except msgspec.DecodeError as error:
            message = f"{self.name}: said what is no message: {error}"
            raise ChildError(message) from error
        if isinstance(heard, Failed):
            message = f"{self.name}: {heard.reason}"
            raise ChildError(message)
        if not isinstance(heard, answer):
            message = f"{self.name}: answered with {heard} instead of {answer.__name__}"
            raise ChildError(message)
        return heard

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its process group, which it makes before it says ``Hello``; nothing if it has ended."""
        if self._process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(self.pid) == self.pid:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    def stop(self, patience_s: float) -> None:
        """Let it end by itself for this long, then kill its group."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._lines.send(Stop())
            self._process.wait(patience_s)
        self.kill()

    def kill(self) -> None:
        """End its group now. Idempotent."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.close()

    def _epitaph(self) -> str:
        try:
            code = self._process.wait(_EPITAPH_S)
        except subprocess.TimeoutExpired:
            return f"{self.name}: closed its pipe without an answer{self._last_words()}"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self.name}: {how} before its work was done{self._last_words()}"

    def _last_words(self) -> str:
        """The end of what it wrote to standard error."""
        if self._errors is None:
            return ""
        size = os.fstat(self._errors.fileno()).st_size
        tail = os.pread(self._errors.fileno(), 2000, max(0, size - 2000)).decode("utf-8", "replace").strip()
        return f"; it wrote:\n{tail}" if tail else ""
