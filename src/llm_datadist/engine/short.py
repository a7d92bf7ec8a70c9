"""The short way of block transfers.

Most of what a transfer looks up and checks is the same the next time: which two caches, whether they fit each other,
where their tensors are. After a transfer has succeeded that is kept with the link, and a later one between the same two
caches needs only what can have changed: block ids, the state of link and caches, and the peer's epoch. Anything
unusual is left to the long way, which also finds the words for it.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from llm_datadist.engine.errors import finished_blocks, path_failure
from llm_datadist.engine.requests import BlocksKey, IdKey
from llm_datadist.memory.devices import Devices
from llm_datadist.memory.regions import RegionError
from llm_datadist.net.channel import ChannelClosedError
from llm_datadist.observe.events import SUCCESS
from llm_datadist.observe.recorder import status_of
from llm_datadist.paths.base import FEW, OutOfReachError, PathDeniedError, PathError, TensorPairs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.engine.catalogue import CacheEntry
    from llm_datadist.engine.core import Core
    from llm_datadist.engine.link import PeerLink
    from llm_datadist.engine.network import Links
    from llm_datadist.engine.peer_catalogue import PeerCache
    from llm_datadist.engine.requests import Key
    from llm_datadist.paths.base import Path, Shortcut
    from llm_datadist.utils.deadline import Deadline


MOST_BLOCKS: Final = 512
"""That are looked at one by one; the long way looks at more of them at once, which is then quicker."""
_PER_LAYER: Final = 2
"""Tensors of a layer, unless a push says otherwise; then it goes the long way."""


class Pairing(NamedTuple):
    """A local and a remote blocks cache of which all tensors pair up."""

    local: CacheEntry
    path: Path
    shortcut: Shortcut
    epoch: int
    tensors: int
    whole_layers: bool
    """Whether the tensors are K and V of layers, as a push takes for granted."""
    block_bytes: int
    local_blocks: int
    remote_blocks: int

    def num_bytes(self, blocks: int) -> int:
        """Of so many blocks, in all tensors."""
        return blocks * self.block_bytes * self.tensors

    def fits(self, local_ids: Sequence[int], remote_ids: Sequence[int], *, pull: bool) -> bool:
        """Whether these are good block pairs, no destination twice; and for a push the tensors whole layers."""
        count = len(local_ids)
        if count != len(remote_ids) or not 0 < count <= MOST_BLOCKS or not (pull or self.whole_layers):
            return False
        for here, there in zip(local_ids, remote_ids, strict=True):
            if type(here) is not int or type(there) is not int:
                return False
            if not (0 <= here < self.local_blocks and 0 <= there < self.remote_blocks):
                return False
        return count == 1 or len(set(local_ids if pull else remote_ids)) == count


def short_name(key: Key) -> int | None:
    """What a pairing is kept under: a model id, or the complement of a cache id of the peer; None for other keys."""
    if isinstance(key, BlocksKey):
        return key.model_id
    return ~key.cache_id if isinstance(key, IdKey) and key.cache_id > 0 else None


class ShortTransfers:
    """Runs block transfers of one engine between caches that are known to fit. Thread-safe."""

    def __init__(self, core: Core, links: Links) -> None:
        self._catalogue = core.catalogue
        self._recorder = core.recorder
        self._links = links
        self._pid = os.getpid()
        self._own_id = core.identity.cluster_id

    @staticmethod
    def remember(link: PeerLink, path: Path, name: int, local: CacheEntry, remote: PeerCache, epoch: int) -> None:
        """Keep what a successful transfer has found out, if both are blocks caches that fit each other as a whole."""
        tensors = len(local.addrs)
        known = link.pairings.get((name, local.cache_id))
        if known is not None and known.path is path and known.epoch == epoch:
            return
        blocks = local.has_blocks and remote.has_blocks and local.geometry.stride == remote.geometry.stride
        if local.hidden or not blocks or tensors != remote.num_tensors or tensors > FEW:
            return
        devices = Devices(local.device, remote.device)
        pairs = TensorPairs(local.addrs.tolist(), remote.regions.tolist(), epoch, devices)
        try:
            shortcut = path.shortcut(pairs)
        except (RegionError, OutOfReachError):  # unregistered meanwhile, or only the tensors that were moved are
            return
        for key, old in tuple(link.pairings.items()):
            if old.epoch != epoch:  # of no use any more, and perhaps of a cache that is gone
                link.pairings.pop(key, None)
        link.pairings[name, local.cache_id] = Pairing(
            local,
            path,
            shortcut,
            epoch,
            tensors=tensors,
            whole_layers=not tensors % _PER_LAYER,
            block_bytes=local.geometry.stride,
            local_blocks=local.geometry.entries,
            remote_blocks=remote.geometry.entries,
        )

    def pull(
        self,
        cluster_id: int,
        name: int,
        cache_id: int,
        local_ids: Sequence[int],
        remote_ids: Sequence[int],
        deadline: Deadline,
    ) -> bool:
        """``pull_blocks`` from a peer's blocks cache (``short_name``), all tensors; False if it must go the long way.

        Raises:
            LLMException: the transfer failed.
        """
        if cluster_id == self._own_id:
            return False
        return self._transfer(cluster_id, name, cache_id, local_ids, remote_ids, deadline, pull=True)

    def push(
        self,
        cluster_id: int,
        name: int,
        cache_id: int,
        local_ids: Sequence[int],
        remote_ids: Sequence[int],
        deadline: Deadline,
    ) -> bool:
        """``push_blocks`` of all tensors, two a layer, as ``pull``."""
        return self._transfer(cluster_id, name, cache_id, local_ids, remote_ids, deadline, pull=False)

    def _transfer(
        self,
        cluster_id: int,
        name: int,
        cache_id: int,
        local_ids: Sequence[int],
        remote_ids: Sequence[int],
        deadline: Deadline,
        *,
        pull: bool,
    ) -> bool:
        link = self._links.peek(cluster_id)
        if link is None or os.getpid() != self._pid:
            return False
        pairing = link.pairings.get((name, cache_id))
        if pairing is None or not pairing.fits(local_ids, remote_ids, pull=pull):
            return False
        operation = "pull_blocks" if pull else "push_blocks"
        begun = time.monotonic_ns() if self._recorder.observers else 0
        local, shortcut = pairing.local, pairing.shortcut
        ticket = deadline  # an object that no other transfer has
        try:
            if not self._catalogue.hold(local, ticket):
                link.pairings.pop((name, cache_id), None)
                return False
            link.begin(ticket)
            if not link.uses(pairing.path):
                return False
            (shortcut.read if pull else shortcut.write)(pairing.block_bytes, local_ids, remote_ids, deadline)
        except (RegionError, PathDeniedError):
            link.pairings.pop((name, cache_id), None)
            deadline.queued_s = 0.0
            return False
        except BaseException as error:
            failed: BaseException = error
            if isinstance(error, (PathError, ChannelClosedError)):
                destination = local_ids if pull else remote_ids
                done = finished_blocks(error, destination, pairing.block_bytes, local=pull)
                failed = path_failure(error, operation, link, pairing.path.name, deadline, done)
            self._tell(pairing, operation, cluster_id, len(local_ids), deadline, begun, status_of(failed))
            if failed is error:
                raise
            raise failed from error
        finally:
            try:
                link.running.discard(ticket)
            finally:
                try:
                    local.holders.discard(ticket)
                finally:
                    link.end(ticket)
                    self._catalogue.let_go(local, ticket)
        self._tell(pairing, operation, cluster_id, len(local_ids), deadline, begun)
        return True

    def _tell(
        self,
        pairing: Pairing,
        operation: str,
        cluster_id: int,
        blocks: int,
        deadline: Deadline,
        begun: int,
        status: str = SUCCESS,
    ) -> None:
        """Tell the observers that a transfer has ended, if there were any when it began."""
        if begun:
            size = pairing.num_bytes(blocks)
            self._recorder.short(operation, cluster_id, pairing.path.name, deadline, begun, status, num_bytes=size)
