"""NIXL with its UCX backend, fed as its own examples do: arrays of descriptors, one transfer for the whole case.

By the clock: descriptor lists from arrays that are ready, ``initialize_xfer``, ``transfer``, polling until it is done.
"""

from __future__ import annotations

import base64
import os
from typing import TYPE_CHECKING, Any

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config

from llm_datadist.cli.bench import cases
from llm_datadist.cli.bench.contestant import Contestant, Owner, serve

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llm_datadist.cli.bench.protocol import Offer
    from llm_datadist.cli.bench.results import Case

_KIND = "DRAM"


class NixlOwner(Owner):
    """Registers its memory and hands out its metadata; NIXL's own thread does what is to be done here."""

    def open(self) -> dict[str, Any]:
        """See ``Owner.open``."""
        self._agent = _agent("owner", self.case, self.tensors)
        return {"metadata": base64.b64encode(self._agent.get_agent_metadata()).decode()}


class NixlContestant(Contestant):
    """Reads and writes with one transfer."""

    def open(self, offer: Offer) -> None:
        """See ``Contestant.open``."""
        self._agent = _agent("caller", self.case, self.tensors)
        self._peer = self._agent.add_remote_agent(base64.b64decode(offer.extra["metadata"]))
        self._operation = "READ" if cases.pulls(self.case) else "WRITE"
        spans = cases.Spans.of(self.case, self.selection, self.tensors.addresses, offer.addresses)
        self._local = _descriptors(spans.local, spans.lengths)
        self._remote = _descriptors(spans.remote, spans.lengths)

    def move(self) -> None:
        """See ``Contestant.move``."""
        agent = self._agent
        local, remote = agent.get_xfer_descs(self._local, _KIND), agent.get_xfer_descs(self._remote, _KIND)
        self._handle = agent.initialize_xfer(self._operation, local, remote, self._peer)
        state = agent.transfer(self._handle)
        while state == "PROC":
            state = agent.check_xfer_state(self._handle)
        if state != "DONE":
            message = f"the transfer ended in state {state}"
            raise RuntimeError(message)

    def release(self) -> None:
        """See ``Contestant.release``."""
        self._agent.release_xfer_handle(self._handle)


def _agent(name: str, case: Case, tensors: cases.Tensors) -> nixl_agent:
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    size = case.blocks * case.block_bytes
    agent.register_memory(agent.get_reg_descs([(address, size, 0, "") for address in tensors.addresses], _KIND))
    return agent


def _descriptors(addresses: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
    return np.stack([addresses, lengths, np.zeros_like(lengths)], axis=1).astype(np.uint64)


if __name__ == "__main__":
    serve(NixlOwner, NixlContestant)
    os._exit(0)  # on a host without RDMA its destructors can end in a crash
