"""The processes in which the cells of the fault matrix run."""

from __future__ import annotations

import contextlib
import multiprocessing
from typing import TYPE_CHECKING, Any

import fault_matrix_child as child
from llm_datadist.testing import TcpProxy
from peers import Peer, Process

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENT_S = 20.0
POOL = '{"memory_size": 50331648, "page_shift": 12}'
CLIENT_ID, SERVER_ID = 1, 2
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["fault_matrix_child"])


class Rigs:
    """One rig for each path; one in which something went wrong is not used again."""

    def __init__(self) -> None:
        self._rigs: dict[str, Rig] = {}

    @contextlib.contextmanager
    def use(self, path: str) -> Iterator[Rig]:
        """The rig of a path, for one cell."""
        rig = self._rigs.pop(path, None) or Rig(path)
        try:
            yield rig
        except BaseException:
            rig.close()
            raise
        self._rigs[path] = rig

    def close(self) -> None:
        """End everything."""
        for rig in self._rigs.values():
            rig.close()


class Rig:
    """Two processes and a proxy between them, for all cells of one path; those that were killed are replaced."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.client = Process(context=_FORKS)
        self.server = self.client if path == "inprocess" else Process(context=_FORKS)
        self.warm: set[tuple[str, str]] = set()
        """Names of nodes between which everything has been made that is made only once."""
        self._lives = 0
        self._peers: dict[tuple[int, bool], Peer] = {}
        self.ids: dict[bool, dict[str, int]] = {}
        self.proxy = TcpProxy(("127.0.0.1", 1))

    def close(self) -> None:
        """End everything."""
        self.proxy.close()
        for process in {self.client, self.server}:
            process.close()

    def here(self, *, message: bool) -> Peer:
        """The side that operates."""
        return self._peer(CLIENT_ID, message=message)

    def there(self, *, message: bool) -> Peer:
        """Its peer."""
        peer = self._peer(SERVER_ID, message=message)
        assert peer.address is not None
        self.proxy.retarget(peer.address)
        return peer

    def _peer(self, cluster_id: int, *, message: bool, port: int = 0) -> Peer:
        known = self._peers.get((cluster_id, message))
        if known is not None:
            return known
        self._lives += 1
        process = self.client if cluster_id == CLIENT_ID else self.server
        peer = self._peers[cluster_id, message] = Peer(process, f"{cluster_id}-{message}-{self._lives}")
        properties: dict[str, Any] = {"mem_pool_cfg": POOL} if self.path == "mapped" else {}
        peer.init(
            cluster_id + 10 * message,
            paths=self.path,
            huge_pages=False,
            enable_remote_cache_accessible=not message,
            listen_ip_info=f"127.0.0.1:{port}",
            sync_kv_timeout=int(PATIENT_S * 1000),
            **properties,
        )
        if properties:
            peer.call("use_pool")
        ids = peer.call(child.setup)
        if cluster_id == SERVER_ID:
            self.ids[message] = ids
        return peer

    def kill_server(self) -> None:
        """Kill -9."""
        self.server.kill()
        self.server.close()

    def new_server(self, *, message: bool, port: int = 0) -> Peer:
        """Another process in the place of the one that was killed, with the same cluster id."""
        for key in [key for key in self._peers if key[0] == SERVER_ID]:
            del self._peers[key]
        self.server = Process(context=_FORKS)
        return self._peer(SERVER_ID, message=message, port=port)

    def new_node(self, *, message: bool) -> Peer:
        """Another life of the server in the same process, after it was finalized."""
        del self._peers[SERVER_ID, message]
        return self._peer(SERVER_ID, message=message)
