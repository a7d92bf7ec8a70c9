"""Why the last attempt to link or unlink each cluster failed."""

from __future__ import annotations

import copy
import errno
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from llm_datadist.engine.errors import LinkError, failure
from llm_datadist.net.address import text
from llm_datadist.status import LLMStatusCode
from llm_datadist.utils import limits, log

if TYPE_CHECKING:
    from llm_datadist.engine.requests import PeerAddress
    from llm_datadist.status import LLMException

_MOST: Final = 1024
_NO_ROUTE: Final = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})


class LinkFailures:
    """Of each cluster the failure of its last call, if it failed; of at most 1024, the latest. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures: OrderedDict[int, LLMException] = OrderedDict()

    def add(self, operation: str, peer: PeerAddress, error: LinkError) -> None:
        """A call has failed: log it, and remember it instead of an earlier one."""
        where = ", ".join(text(remote) for remote in peer.remotes) or "no address given"
        failed = failure(
            error.code,
            operation,
            f"cluster {peer.cluster_id} ({where}): {error}",
            peer=peer.cluster_id,
            phase="link",
            retryable=error.retryable,
            hint=error.hint,
        )
        log.error("%s", failed)
        with self._lock:
            self._failures[peer.cluster_id] = failed
            self._failures.move_to_end(peer.cluster_id)
            while len(self._failures) > _MOST:
                self._failures.popitem(last=False)

    def forget(self, cluster_id: int) -> None:
        """A call has succeeded."""
        with self._lock:
            self._failures.pop(cluster_id, None)

    def get(self, cluster_id: int) -> LLMException | None:
        """The failure of the last call, as an exception that is the caller's own; None if it did not fail."""
        with self._lock:
            return copy.copy(self._failures.get(cluster_id))


def cannot_connect(error: OSError, where: str, *, late: bool) -> LinkError:
    """The failure of a connection attempt to the listener of a peer."""
    code = LLMStatusCode.LLM_TIMEOUT if late else LLMStatusCode.LLM_LINK_FAILED
    hint: str | None = None
    if late:
        hint = (
            "the host does not answer: see whether it is up, and whether a firewall drops packets; else give more time"
        )
    elif error.errno == errno.ECONNREFUSED:
        hint = (
            "nobody listens there: check ip and port, that the peer was initialised with listen_ip_info,"
            " and that no firewall refuses the port"
        )
    elif error.errno in _NO_ROUTE:
        hint = "there is no way to that host: check the ip and the network"
    reason, advice = limits.explain(error)
    return LinkError(code, f"cannot connect to {where}: {reason}", retryable=True, hint=hint or advice)
