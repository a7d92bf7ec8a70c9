"""What of the example with vLLM needs no vLLM."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

ENGINES = Path(__file__).parents[1] / "examples" / "vllm_pd" / "engines.py"


def load(path: Path) -> ModuleType:
    """A module of the example, which is no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_port_is_nobody_else_s_until_its_server_starts() -> None:
    """Other servers start first, for minutes: what they connect to, and the ports that they take, are others."""
    engines = load(ENGINES)
    first = engines.free_port()
    with socket.socket() as taken:
        with contextlib.suppress(OSError):  # somebody else has it: as good
            taken.bind(("127.0.0.1", first + 1))
        later = [engines.free_port() for _ in range(100)]
    assert len({first, *later}) == 101
    assert first + 1 not in later
    lowest_given_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    assert max(later) < max(lowest_given_out, 32_768)
