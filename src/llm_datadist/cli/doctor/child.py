"""The other process of the trial of ``process_vm``: says in one line what it could do to its parent, then waits."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import TYPE_CHECKING

from llm_datadist.cli.doctor.trials import NONCE_BYTES, reach
from llm_datadist.memory import syscalls

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Read the nonce at an address of the parent, write it reversed to another one, open a memfd of it."""
    parent, nonce, answer, table = map(int, arguments)
    ours = ctypes.create_string_buffer(NONCE_BYTES)
    told = {"failed": "", "code": 0, "address": ctypes.addressof(ours)}
    doing = "read"
    try:
        reach(syscalls.process_vm_readv, parent, ours, nonce)
        doing = "write to"
        reversed_nonce = ctypes.create_string_buffer(ours.raw[::-1], NONCE_BYTES)
        reach(syscalls.process_vm_writev, parent, reversed_nonce, answer)
        doing = "open a memfd of"
        os.close(os.open(f"/proc/{parent}/fd/{table}", os.O_RDONLY))
    except OSError as error:
        told.update(failed=doing, code=error.errno or 0)
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    sys.stdin.read()  # until the parent has had its turn


if __name__ == "__main__":
    main(sys.argv[1:])
