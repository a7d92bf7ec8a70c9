"""Mooncake's transfer engine over TCP, synchronous batches; it refuses batches of many thousand requests."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mooncake.engine import TransferEngine

from llm_datadist.cli.bench import cases
from llm_datadist.cli.bench.contestant import Contestant, Owner, serve

if TYPE_CHECKING:
    from llm_datadist.cli.bench.protocol import Offer
    from llm_datadist.cli.bench.results import Case

_BATCH = 256


class MooncakeOwner(Owner):
    """Registers its memory; Mooncake's own threads do what is to be done here."""

    def open(self) -> dict[str, Any]:
        """See ``Owner.open``."""
        self._engine = _engine(self.case, self.tensors)
        return {"port": self._engine.get_rpc_port()}


class MooncakeContestant(Contestant):
    """Reads and writes batch by batch."""

    def open(self, offer: Offer) -> None:
        """See ``Contestant.open``."""
        self._engine = _engine(self.case, self.tensors)
        self._peer = f"127.0.0.1:{offer.extra['port']}"
        spans = cases.Spans.of(self.case, self.selection, self.tensors.addresses, offer.addresses)
        columns = spans.local.tolist(), spans.remote.tolist(), spans.lengths.tolist()
        starts = range(0, len(spans.lengths), _BATCH)
        self._batches = [[column[start : start + _BATCH] for column in columns] for start in starts]
        engine = self._engine
        self._call = engine.batch_transfer_sync_read if cases.pulls(self.case) else engine.batch_transfer_sync_write

    def move(self) -> None:
        """See ``Contestant.move``."""
        for batch in self._batches:
            if result := self._call(self._peer, *batch):
                message = f"a batch of {len(batch[0])} ended with {result}"
                raise RuntimeError(message)


def _engine(case: Case, tensors: cases.Tensors) -> TransferEngine:
    engine = TransferEngine()
    if result := engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        message = f"TransferEngine.initialize ended with {result}"
        raise RuntimeError(message)
    for address in tensors.addresses:
        if result := engine.register_memory(address, case.blocks * case.block_bytes):
            message = f"TransferEngine.register_memory ended with {result}"
            raise RuntimeError(message)
    return engine


if __name__ == "__main__":
    serve(MooncakeOwner, MooncakeContestant)
    os._exit(0)  # its threads need not end in order
