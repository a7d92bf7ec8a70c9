"""In which memory an address is: that of the host, or that of a GPU.

All GPU memory of a process comes from the CUDA driver, whichever library has asked for it. So a process that has not
loaded the driver has none: nothing is imported, loaded or initialised here in order to find that out.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Final, NamedTuple

_DRIVER: Final = b"libcuda.so.1"
_SUCCESS: Final = 0
_NOT_INITIALIZED: Final = (3, 4)
"""``cuInit`` has not been called yet, or the driver is shutting down: there is no GPU memory."""
_ON_DEVICE: Final = 2  # CU_MEMORYTYPE_DEVICE


class DeviceMemoryError(ValueError):
    """Memory that is neither wholly host memory nor wholly in one allocation of one GPU; ``hint`` is the remedy."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.hint = hint


class Devices(NamedTuple):
    """In which memory the two sides of a transfer are: the number of a GPU, or None for host memory."""

    here: int | None = None
    there: int | None = None

    @property
    def any(self) -> bool:
        """Whether GPU memory takes part."""
        return self.here is not None or self.there is not None

    def __str__(self) -> str:
        return f"{memory_name(self.here)} here, {memory_name(self.there)} there"


HOST_ONLY: Final = Devices()


def memory_name(device: int | None) -> str:
    """For people."""
    return "host memory" if device is None else f"memory of GPU {device}"


class _Place(NamedTuple):
    """What the driver knows of an address in GPU memory."""

    device: int
    managed: bool
    start: int
    """Of the allocation."""
    size: int


class _Driver:
    """The functions of the CUDA driver that are needed here, from a library that the process has loaded already."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._values = (ctypes.c_uint, ctypes.c_uint, ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t)
        # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, IS_MANAGED, DEVICE_ORDINAL, RANGE_START_ADDR, RANGE_SIZE
        self._names = (ctypes.c_int * 5)(2, 8, 9, 11, 12)
        self._ask = library.cuPointerGetAttributes
        self._ask.argtypes = [ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
        for name in ("cuPointerGetAttributes", "cuCtxGetCurrent", "cuDeviceGetCount", "cuDevicePrimaryCtxGetState"):
            getattr(library, name).restype = ctypes.c_int

    def locate(self, address: int) -> _Place | None:
        """What is at an address; None for host memory, pinned or not.

        Raises:
            DeviceMemoryError: the driver cannot tell.
        """
        values = [kind() for kind in self._values]
        targets = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        code = self._ask(len(values), self._names, targets, address)
        if code in _NOT_INITIALIZED:
            return None
        if code != _SUCCESS:
            message = (
                f"the CUDA driver cannot tell which memory is at {address:#x}: error {code} of cuPointerGetAttributes"
            )
            raise DeviceMemoryError(
                message, "initialise CUDA in this thread first, for example torch.cuda.set_device(0)"
            )
        kind, managed, device, start, size = (value.value for value in values)
        return _Place(device, bool(managed), start, size) if kind == _ON_DEVICE or managed else None

    def has_context(self) -> bool:
        """Whether a context exists on any GPU, as far as can be told without making one."""
        context, count = ctypes.c_void_p(), ctypes.c_int()
        if self._library.cuCtxGetCurrent(ctypes.byref(context)) == _SUCCESS and context.value:
            return True
        if self._library.cuDeviceGetCount(ctypes.byref(count)) != _SUCCESS:
            return False
        flags, active = ctypes.c_uint(), ctypes.c_int()
        for device in range(count.value):  # a CUdevice is its ordinal
            code = self._library.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
            if code == _SUCCESS and active.value:
                return True
        return False


_libc: Final = ctypes.CDLL(None)
_dlopen: Final = _libc.dlopen
_dlopen.argtypes = [ctypes.c_char_p, ctypes.c_int]
_dlopen.restype = ctypes.c_void_p


class _Loaded(ctypes.Structure):
    """``struct dl_phdr_info``."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("name", ctypes.c_void_p),
        ("headers", ctypes.c_void_p),
        ("count", ctypes.c_uint16),
        ("adds", ctypes.c_ulonglong),
    )


def _note_adds(loaded: Any, size: int, target: Any) -> int:
    del size
    target[0] = loaded[0].adds
    return 1  # it is the same in all of them


class _Look:
    """The driver, if this process has loaded it. A library that is loaded stays."""

    def __init__(self) -> None:
        self._driver: _Driver | None = None
        self._adds = -1
        self._note_adds: Any = None

    def driver(self) -> _Driver | None:
        """It, or None. To look for it costs 60 us, so that is done only when a library was loaded since."""
        if self._driver is None:
            if self._note_adds is None:
                kind = ctypes.CFUNCTYPE(
                    ctypes.c_int, ctypes.POINTER(_Loaded), ctypes.c_size_t, ctypes.POINTER(ctypes.c_ulonglong)
                )
                self._note_adds = kind(_note_adds)
            adds = ctypes.c_ulonglong()
            _libc.dl_iterate_phdr(self._note_adds, ctypes.byref(adds))
            if adds.value != self._adds:
                handle = _dlopen(_DRIVER, os.RTLD_NOLOAD | os.RTLD_LAZY)
                if handle:
                    self._driver = _Driver(ctypes.CDLL(_DRIVER.decode(), handle=handle))
                self._adds = adds.value
        return self._driver


_look: Final = _Look()


def loaded() -> bool:
    """Whether this process has loaded the CUDA driver; else there is no GPU memory, and nothing to ask."""
    return _look.driver() is not None


def in_use() -> bool:
    """Whether this process can have GPU memory: it has loaded the CUDA driver and made a context on some GPU."""
    driver = _look.driver()
    return driver is not None and driver.has_context()


def device_of(address: int, size: int) -> int | None:
    """The GPU in whose memory ``size`` bytes are; None if they are in host memory, mapped or not.

    Raises:
        DeviceMemoryError: they are not all in one allocation, or in memory that moves between host and GPUs.
    """
    driver = _look.driver()
    if driver is None:
        return None
    place = driver.locate(address)
    if place is None:
        last = driver.locate(address + size - 1)
        if last is not None:
            message = f"it begins in host memory and ends in {memory_name(last.device)}"
            raise DeviceMemoryError(message, "check address, shape and data type of the tensor")
        return None
    if place.managed:
        message = "it is managed memory (cudaMallocManaged), which moves between host and GPUs"
        raise DeviceMemoryError(message, "allocate it with cudaMalloc, as frameworks do, or in host memory")
    if not place.start <= address <= address + size <= place.start + place.size:
        message = (
            f"it reaches beyond its allocation of {place.size} bytes at {place.start:#x} in {memory_name(place.device)}"
        )
        hint = (
            "check shape and data type of the tensor; allocate it in one piece (with torch: "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False)"
        )
        raise DeviceMemoryError(message, hint)
    return place.device
