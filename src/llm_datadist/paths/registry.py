"""All known transports: ours, and those that installed packages add through the entry point group.

A package adds one by ``[project.entry-points."llm_datadist.paths"]`` with ``name = "module:object"``, where the object
is a ``Transport``, or a class or function that makes one without arguments, and ``name`` is its name. It is imported
when a link first tries it.
"""

from __future__ import annotations

import functools
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final

from llm_datadist.paths.base import PathRejectedError, Transport
from llm_datadist.paths.inprocess import InProcess
from llm_datadist.paths.mapped import Mapped
from llm_datadist.paths.nixl import Nixl
from llm_datadist.paths.process_vm import ProcessVm
from llm_datadist.paths.tcp import Tcp
from llm_datadist.utils import log

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "llm_datadist.paths"
_NAME_CHARS: Final = 128
_SAME_HOST: Final[tuple[Transport, ...]] = (InProcess(), ProcessVm(), Mapped())
_FABRIC: Final[tuple[Transport, ...]] = (Nixl(),)
_ANYWHERE: Final[tuple[Transport, ...]] = (Tcp(),)
BUILT_IN: Final = tuple(transport.name for transport in (*_SAME_HOST, *_FABRIC, *_ANYWHERE))
"""Names of our own, best first."""

transports: Final[dict[str, Transport]] = {
    transport.name: transport for transport in (*_SAME_HOST, *_FABRIC, *_ANYWHERE)
}
"""By name, as far as they are loaded; tests may exchange them."""


@functools.cache
def _additions() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        if entry.name in BUILT_IN or entry.name in found or not _is_name(entry.name):
            log.warn("entry point %s = %s of group %s is ignored: the name is taken", entry.name, entry.value, GROUP)
        else:
            found[entry.name] = entry
    return found


def _is_name(name: str) -> bool:
    return name != "auto" and "," not in name and 0 < len(name) <= _NAME_CHARS


def names() -> tuple[str, ...]:
    """All known ones, best first: those within a host, NIXL, the added ones by name, TCP."""
    here, fabric, anywhere = ([transport.name for transport in some] for some in (_SAME_HOST, _FABRIC, _ANYWHERE))
    return (*here, *fabric, *_additions(), *anywhere)


def get(name: str) -> Transport:
    """The transport of that name.

    Raises:
        PathRejectedError: there is none, or the entry point that adds it is broken.
    """
    known = transports.get(name)
    if known is not None:
        return known
    entry = _additions().get(name)
    if entry is None:
        message = "this side has no such path"
        raise PathRejectedError(message, f"install the package that adds it (entry point group {GROUP})")
    hint = "repair or remove the package that adds it"
    try:
        made = entry.load()
        made = made if isinstance(made, Transport) else made()
    except Exception as error:
        message = f"its entry point {entry.value} cannot be loaded: {type(error).__name__}: {error}"
        raise PathRejectedError(message, hint) from error
    if not isinstance(made, Transport) or getattr(made, "name", None) != name:
        message = f"its entry point {entry.value} gives {made!r}, which is no Transport of the name {name!r}"
        raise PathRejectedError(message, hint)
    transports[name] = made
    return made
