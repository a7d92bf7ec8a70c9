"""A look at a peer from a temporary engine: introduces itself, tries every path, and leaves. No link comes of it.

At the peer it is a handshake that is not gone through with: the peer's links, caches and gauges never show it.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from llm_datadist.engine.admission import Admission
from llm_datadist.engine.comms import Comms
from llm_datadist.engine.core import Core
from llm_datadist.engine.errors import LinkError
from llm_datadist.engine.handshake import Handshaker
from llm_datadist.net.channel import ChannelClosedError, ReplyTimeoutError
from llm_datadist.paths.survey import PathFinding, survey
from llm_datadist.status import LLMStatusCode
from llm_datadist.utils.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.engine.link import Link, LinkTerms
    from llm_datadist.engine.options import EngineOptions
    from llm_datadist.net.address import Address
    from llm_datadist.wire.messages import Identity

_STAY_S: Final = 60.0
_END_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Visit:
    """What was found."""

    peer: Identity
    here: Identity
    """This process."""
    terms: LinkTerms
    seconds: float
    """From the first packet to the end of both introductions."""
    paths: tuple[PathFinding, ...]

    @property
    def same_host(self) -> bool:
        """Whether both run on one kernel."""
        return bool(self.here.boot_id) and self.here.boot_id == self.peer.boot_id


def visit(
    address: Address, options: EngineOptions, timeout_s: float, tell: Callable[[str], object] = lambda _text: None
) -> Visit:
    """Look at the peer that listens at ``address``, in whichever mode it is. ``tell`` hears what is done next.

    Each step, the introduction and every path, takes at most ``timeout_s``.

    Raises:
        LLMException: LLM_PARAM_INVALID: the certificates cannot be used.
        OSError, RuntimeError: the system gives this process no descriptors, memory or threads.
        LinkError: the peer cannot be reached, or refuses.
    """
    tell("introduction")
    try:
        return _visit(address, replace(options, remote_accessible=True), timeout_s, tell)
    except LinkError as error:
        if error.code is not LLMStatusCode.LLM_PARAM_INVALID:
            raise
    return _visit(address, replace(options, remote_accessible=False), timeout_s, tell)  # the peer is in the other mode


def _epoch(link: Link, timeout_s: float) -> int:
    try:
        return link.catalogue(Deadline.after(timeout_s)).epoch
    except (ChannelClosedError, ReplyTimeoutError) as error:
        message = f"{link.address}: it has introduced itself, but then {error}"
        raise LinkError(LLMStatusCode.LLM_LINK_FAILED, message, hint="see whether it is stalled") from error


def _visit(address: Address, options: EngineOptions, timeout_s: float, tell: Callable[[str], object]) -> Visit:
    core = Core(secrets.randbits(63), options, Admission(options), lambda _entry: None, ())
    try:
        handshaker = Handshaker(core, Comms(core))
        begun = time.perf_counter()
        link, context = handshaker.visit(address, Deadline.after(timeout_s), _STAY_S)
        seconds = time.perf_counter() - begun
        findings: list[PathFinding] = []
        try:
            tell("paths")
            epoch = _epoch(link, timeout_s)
            for finding in survey(link.peer, context, epoch, timeout_s):
                findings.append(finding)
                tell(finding.name)
        finally:
            core.ender.end(link, Deadline.after(_END_S))
    finally:
        core.close()
    return Visit(link.peer.identity, core.identity, link.terms, seconds, tuple(findings))
