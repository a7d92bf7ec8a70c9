"""Documented constraints of the original that this library does not have.

``LLMConfig.strict_constraints`` turns them into errors, for programs that will be deployed there; docs/compatibility.md
lists them. Those on option values are checked in ``options``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_datadist.engine.catalogue import geometry_of
from llm_datadist.engine.errors import invalid
from llm_datadist.engine.requests import PullRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from llm_datadist.engine.catalogue import CacheEntry
    from llm_datadist.engine.options import EngineOptions
    from llm_datadist.engine.requests import CacheSpec, PeerAddress, PushRequest
    from llm_datadist.status import LLMException

_MAX_DEVICE_BYTES: Final = 50 << 30
_MAX_CLUSTERS: Final = 16
_MAX_HOST_BLOCKS: Final = 60 * 1024
_MAX_HOST_ITEMS: Final = 7160
_WHOLE_RANGES: Final = frozenset({"pull_cache", "pull_blocks", "push_cache", "push_blocks"})


def refused(operation: str, context: str) -> LLMException:
    """The exception for a constraint that is not kept."""
    return invalid(operation, context, hint="the original does not allow it (LLMConfig.strict_constraints is set)")


def check_register(
    operation: str, spec: CacheSpec, *, accessible: bool, linked: bool, registered: Iterable[CacheEntry]
) -> None:
    """Memory that peers name is registered before the first link; there is a limit for memory of the device.

    Raises:
        LLMException: LLM_PARAM_INVALID.
    """
    if accessible and linked:
        raise refused(operation, "memory that peers can reach is registered after a cluster was linked")
    caches = [entry.spec for entry in registered if entry.spec.on_device and not entry.owned]
    total = sum(each.num_tensors * geometry_of(each).tensor_size for each in (*caches, spec))
    if spec.on_device and total > _MAX_DEVICE_BYTES:
        raise refused(operation, f"{total} bytes on DEVICE would be registered, more than {_MAX_DEVICE_BYTES}")


def check_unregister(*, linked: bool) -> None:
    """Memory is given back after the last link has ended.

    Raises:
        LLMException: LLM_PARAM_INVALID.
    """
    if linked:
        raise refused("unregister_cache", "a cache is unregistered while a cluster is linked")


def check_link(peers: Sequence[PeerAddress]) -> None:
    """Few clusters in one call, reached by IPv4.

    Raises:
        LLMException: LLM_PARAM_INVALID.
    """
    if len(peers) > _MAX_CLUSTERS:
        raise refused("link_clusters", f"{len(peers)} clusters in one call, more than {_MAX_CLUSTERS}")
    for peer in peers:
        for ip, _ in peer.remotes:
            if ":" in ip:
                raise refused("link_clusters", f"cluster {peer.cluster_id} has the IPv6 address {ip}")


def check_request(request: PullRequest | PushRequest, local: CacheEntry | None, options: EngineOptions) -> None:
    """The same layers on both sides; what a pull into host memory needs in message mode.

    Raises:
        LLMException: LLM_PARAM_INVALID.
    """
    given = request.src_layers is not None and request.dst_layers is not None
    if given and request.operation in _WHOLE_RANGES and request.src_layers != request.dst_layers:
        raise refused(request.operation, f"src_layer_range {request.src_layers} is not {request.dst_layers}")
    if local is None or local.spec.on_device or options.remote_accessible or not isinstance(request, PullRequest):
        return
    if options.device_pool is None:
        raise refused(request.operation, "a pull into HOST memory in message mode needs a device pool (mem_pool_cfg)")
    blocks = len(request.dst_blocks or ())
    if blocks > _MAX_HOST_BLOCKS or (blocks and blocks + local.spec.num_tensors > _MAX_HOST_ITEMS):
        context = f"{blocks} blocks and {local.spec.num_tensors} tensors are pulled into HOST memory in message mode"
        limits = f"at most {_MAX_HOST_BLOCKS} blocks, and {_MAX_HOST_ITEMS} blocks and tensors together"
        raise refused(request.operation, f"{context}, {limits}")
