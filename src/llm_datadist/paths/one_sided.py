"""What the paths that copy by themselves share: the peer's interpreter has no part in a transfer.

The peer's region table is mapped here, so every transfer is checked against what is registered at that very moment.
"""

from __future__ import annotations

import abc
import ctypes
import select
import struct
from typing import TYPE_CHECKING, Final

from llm_datadist.layout.progress import Progress
from llm_datadist.memory import iovec, syscalls
from llm_datadist.memory.move import MemoryFaultError, move
from llm_datadist.memory.regions import StaleEpochError
from llm_datadist.paths.base import FEW, Path, PathError, PathFaultError, PathRejectedError, PeerGoneError, Shortcut
from llm_datadist.paths.parallel import Checkpoint, run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from llm_datadist.layout.spans import Spans
    from llm_datadist.memory.regions import RegionView
    from llm_datadist.paths.base import Context, TensorPairs
    from llm_datadist.utils.deadline import Deadline
    from llm_datadist.wire.messages import Identity

    U64 = NDArray[np.uint64]

PARALLEL_BYTES: Final = 4 << 20
"""Below this, handing a part to another thread costs more than it saves."""
_LEAST_PART: Final = 2 << 20
_PARTS_PER_THREAD: Final = 3
"""More than one, so that no thread has much left to do when the others have finished; not many, because a thread needs
the interpreter between two of them, and a core, which others may have meanwhile."""


def require_same_host(theirs: Identity, ours: Identity) -> None:
    """Make sure that both run on the same kernel.

    Raises:
        PathRejectedError: they do not, or it is not known.
    """
    for who, identity in (("this process", ours), ("the peer", theirs)):
        if not identity.boot_id:
            message = f"{who} cannot tell on which host it is: it does not see /proc/sys/kernel/random/boot_id"
            raise PathRejectedError(message, f"mount /proc for {who}")
    if theirs.boot_id != ours.boot_id:
        message = "the peer is on another host"
        raise PathRejectedError(message)


class _Scratch:
    """Room for the iovecs of a small transfer."""

    def __init__(self) -> None:
        self.here, self.there = (ctypes.create_string_buffer(16 * FEW) for _ in range(2))
        self.here_at, self.there_at = (ctypes.c_void_p(ctypes.addressof(room)) for room in (self.here, self.there))


_scratches: Final[list[_Scratch]] = []
"""Free ones. Not one a thread: a signal handler may make a transfer in the middle of another."""
_PACK_INTO: Final = [struct.Struct(f"{words}Q").pack_into for words in range(2 * FEW + 1)]
_COUNTS: Final = [ctypes.c_ulong(count) for count in range(FEW + 1)]


def _poll_for_end(fd: int) -> select.poll:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return poll


class OneSidedPath(Path):
    """Copies with the process_vm calls, in parallel when it is worth it."""

    def __init__(self, pid: int, end: int, view: RegionView, context: Context) -> None:
        """Make a path to the memory that ``view`` tells of, as it is found in process ``pid``.

        ``end`` is a descriptor that becomes readable when the peer's process has ended.
        """
        self.pid = pid
        self.view = view
        self.aborted: bool = False
        self._end = end
        self._poll = _poll_for_end(end).poll
        self._copiers = context.copiers
        self._threads = context.copy_threads

    def read(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        """See ``Path.read``."""
        self._move(spans, deadline, epoch, writing=False)

    def write(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        """See ``Path.write``."""
        self._move(spans, deadline, epoch, writing=True)

    def shortcut(self, pairs: TensorPairs) -> Shortcut:
        """See ``Path.shortcut``."""
        return _OneCall(self, pairs)

    def find(self, region: int) -> tuple[int, int]:
        """Address in process ``pid``, and size, of a region; see ``RegionView.find``."""
        return self.view.find(region)

    def _bases(self, spans: Spans) -> U64:
        """Where in process ``pid`` the peer's side of each tensor is; see ``RegionView.bases``."""
        return self.view.bases(spans.regions, spans.starts, spans.runs.extent)

    def _copy(self, here: U64, there: U64, *, writing: bool) -> None:
        """Move one part; see ``move``."""
        move(syscalls.process_vm_writev if writing else syscalls.process_vm_readv, self.pid, here, there)

    def _move(self, spans: Spans, deadline: Deadline, epoch: int, *, writing: bool) -> None:
        self.check_alive()
        self._check_epoch(epoch)
        spans = spans.cut()
        lengths, regions, here = spans.runs.lengths, spans.regions, spans.here
        there = iovec.Side(self._bases(spans), spans.runs.remote)
        checkpoint = Checkpoint(deadline)
        total = spans.total
        threads = self._threads if total >= PARALLEL_BYTES else 1
        piece = min(iovec.MAX_PIECE, max(_LEAST_PART, total // (threads * _PARTS_PER_THREAD)))
        parts = iter(list(iovec.parts(len(regions), lengths, max_bytes=piece)))
        progress = Progress(len(regions), spans.runs)

        def work() -> None:
            for part in parts:  # shared: each thread takes the next one
                checkpoint()
                if self.aborted:
                    message = "the link was closed"
                    raise PeerGoneError(message)
                # Memory that is being taken back must not be written to; a read of it is found out afterwards.
                if writing:
                    self._check_live(regions)
                self._copy(here.iovecs(lengths, part), there.iovecs(lengths, part), writing=writing)
                progress.mark(part)

        try:
            self._run([work] * threads, regions, checkpoint)
        except PathError as error:
            if self._believable(regions, writing=writing):
                error.progress = progress
            raise

    def _run(self, workers: Sequence[Callable[[], object]], regions: U64, checkpoint: Checkpoint) -> None:
        try:
            run(workers, self._copiers, checkpoint)
        except MemoryFaultError as error:
            self.check_alive()
            self._check_live(regions)
            raise PathFaultError(str(error)) from error
        except OSError as error:
            raise self._translated(error) from error
        self.check_alive()
        self._check_live(regions)

    def _believable(self, regions: U64, *, writing: bool) -> bool:
        """Whether the parts that were moved before a failure are what they should be."""
        if not self.view.alive or not self.view.still_live(regions):
            return False  # the memory may have been used for something else meanwhile
        return not self._has_ended() or (not writing and self._was_the_peer())

    def _was_the_peer(self) -> bool:
        """Of a process that has ended: whether it alone can have been read all the time."""
        return True

    def _has_ended(self) -> bool:
        try:
            return bool(self._poll(0))
        except RuntimeError:  # another thread is in it at this very moment
            return bool(_poll_for_end(self._end).poll(0))

    def check_alive(self) -> None:
        """Raise PeerGoneError unless the peer's process lives, and serves its memory."""
        ended = self._has_ended()
        if ended or not self.view.alive:
            raise PeerGoneError(self._ended() if ended else "the peer has been finalized")

    def _check_epoch(self, epoch: int) -> None:
        now = self.view.epoch
        if epoch not in (0, now):
            message = f"planned with epoch {epoch}, now {now}"
            raise StaleEpochError(message)

    def _check_live(self, regions: U64) -> None:
        if not self.view.still_live(regions):
            message = "a cache was unregistered during the transfer"
            raise StaleEpochError(message)

    @abc.abstractmethod
    def _ended(self) -> str:
        """Says that the peer's process has ended."""

    @abc.abstractmethod
    def _translated(self, error: OSError) -> Exception:
        """What is raised for an error of the system."""

    def close(self) -> None:
        """See ``Path.close``."""
        self.view.close()

    def abort(self) -> None:
        """See ``Path.abort``: a batch takes milliseconds, and none follows."""
        self.aborted = True


class _OneCall(Shortcut):
    """One system call, with addresses that are valid as long as the peer's epoch is the same.

    Where anything at all is unusual the long way does it, perhaps once more, and tells why.
    """

    def __init__(self, path: OneSidedPath, pairs: TensorPairs) -> None:
        super().__init__(path, pairs)
        self._vm = path
        self._pid, self._epoch = ctypes.c_int(path.pid), pairs.epoch
        found = [path.find(region) for region in pairs.regions]
        self._sides = [(near, far) for near, (far, _) in zip(pairs.bases, found, strict=True)]
        self._room = min(size for _, size in found)

    def read(self, size: int, here: Sequence[int], there: Sequence[int], deadline: Deadline) -> None:
        """See ``Shortcut.read``."""
        if not self._move(syscalls.bare_process_vm_readv, size, here, there, deadline):
            super().read(size, here, there, deadline)

    def write(self, size: int, here: Sequence[int], there: Sequence[int], deadline: Deadline) -> None:
        """See ``Shortcut.write``."""
        self._vm.check_alive()  # a process that has taken over the pid must not be written to
        if not self._move(syscalls.bare_process_vm_writev, size, here, there, deadline):
            super().write(size, here, there, deadline)

    def _move(
        self, call: Callable[..., int], size: int, here: Sequence[int], there: Sequence[int], deadline: Deadline
    ) -> bool:
        vm, view, sides = self._vm, self._vm.view, self._sides
        spans = len(here) * len(sides)
        if spans > FEW or size * spans >= PARALLEL_BYTES or view.epoch != self._epoch or deadline.expired():
            return False
        last = self._room - size
        ours: list[int] = []
        theirs: list[int] = []
        for local, remote in zip(here, there, strict=True):
            near_at, far_at = local * size, remote * size
            if not 0 <= far_at <= last:
                return False
            for near, far in sides:
                ours += (near + near_at, size)
                theirs += (far + far_at, size)
        words = len(ours)
        try:
            scratch = _scratches.pop()
        except IndexError:
            scratch = _Scratch()
        pack_into, count = _PACK_INTO[words], _COUNTS[words // 2]
        pack_into(scratch.here, 0, *ours)
        pack_into(scratch.there, 0, *theirs)
        done = call(self._pid, scratch.here_at, count, scratch.there_at, count, _COUNTS[0])
        _scratches.append(scratch)
        if done != size * words // 2 or vm.aborted:
            return False
        vm.check_alive()
        return view.epoch == self._epoch
