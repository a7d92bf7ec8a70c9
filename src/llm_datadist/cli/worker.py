"""The main function of both demo processes: carry out the parent's orders until told to stop, or until it is gone."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import threading
from typing import TYPE_CHECKING

from llm_datadist import LLMException
from llm_datadist.cli.orders import Failed, Link, Poison, Prepare, Progress, Stop, Transfer, Verify
from llm_datadist.cli.plan import Role
from llm_datadist.cli.roles import Decode, Prefill, StepError
from llm_datadist.utils.log import LOGGER_NAME

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from llm_datadist.cli.orders import Answer, Order
    from llm_datadist.cli.plan import Plan


def serve(role: Role, plan: Plan, parent: Connection, patience_s: float) -> None:
    """Carry out orders; end when told to, when the parent ends, or when it is silent for longer than ``patience_s``."""
    threading.Thread(target=_end_with_parent, name="watch-parent", daemon=True).start()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{role.value}: %(message)s"))
    logging.getLogger(LOGGER_NAME).addHandler(handler)

    def report(bytes_done: int) -> None:
        parent.send(Progress(bytes_done))

    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone: nobody to tell
        try:
            process: Prefill | Decode = Prefill(plan, report) if role is Role.PREFILL else Decode(plan, report)
        except (LLMException, MemoryError, OSError) as error:
            parent.send(Failed(f"cannot start: {error}"))
            return
        with contextlib.closing(process):
            while parent.poll(patience_s):
                order = parent.recv()
                if isinstance(order, Stop):
                    return
                parent.send(_carry_out(process, order))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _carry_out(process: Prefill | Decode, order: Order) -> Answer:
    try:
        return _dispatch(process, order)
    except StepError as error:
        return Failed(str(error))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent must learn of it
        return Failed(f"{type(error).__name__}: {error}")


def _dispatch(process: Prefill | Decode, order: Order) -> Answer:
    if isinstance(order, Prepare):
        return process.prepare()
    if isinstance(order, Transfer):
        return process.transfer(order.operation)
    if isinstance(process, Decode):
        if isinstance(order, Link):
            return process.link(order.peer)
        if isinstance(order, Poison):
            return process.poison()
        if isinstance(order, Verify):
            return process.verify(order.operation)
    message = f"{type(process).__name__} does not know what to do with {order}"
    raise TypeError(message)
