"""A filter of system calls as container engines install it."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

_CALLS = {"x86_64": (0xC000003E, 310, 311), "aarch64": (0xC00000B7, 270, 271)}
"""Audit number of the architecture, process_vm_readv, process_vm_writev."""
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def refuse_process_vm() -> None:
    """From now on, process_vm_readv and process_vm_writev fail with EPERM, in this process and its children."""
    architecture, read, write = _CALLS[platform.machine()]
    instructions = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 0, 3, architecture),
        (_LOAD, 0, 0, 0),
        (_EQUAL, 2, 0, read),
        (_EQUAL, 1, 0, write),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
    ]
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    room = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(instructions), ctypes.addressof(room))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(program), 0, 0):  # no new privileges, the filter
        code_number = ctypes.get_errno()
        raise OSError(code_number, os.strerror(code_number))
