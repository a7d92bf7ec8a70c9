"""What a secret and TLS cost, in ratios to plain TCP of the same rounds. Certificates: see SECURITY.md.

python benchmarks/security.py node.pem node.key ca.pem
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from llm_datadist import Cache

BLOCK: Final = 256 << 10
BLOCKS: Final = 512
TOTAL: Final = BLOCKS * BLOCK
LARGE: Final = 4
"""Large pulls of one round."""
SMALL: Final = 200
EVERY: Final = list(range(BLOCKS))
DESC: Final = CacheDesc(1, [BLOCKS, BLOCK], DataType.DT_UINT8)
Options = dict[str, str]


def kinds(files: list[str]) -> dict[str, Options]:
    """What is compared: the first one is what the others are compared with."""
    secret = {"secret": "a secret for measurements"}
    if not files:
        return {"plain": {}, "secret": secret}
    tls = dict(zip(("tls_cert", "tls_key", "tls_ca"), files, strict=True))
    return {"plain": {}, "secret": secret, "TLS": tls, "secret and TLS": {**secret, **tls}}


def engine(cluster_id: int, options: Options, *, listen: bool) -> LLMDataDist:
    """One that moves bytes over TCP."""
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = config.enable_remote_cache_accessible = config.allow_multiple_instances = True
    config.sync_kv_timeout, config.paths = 60_000, "tcp"
    if listen:
        config.listen_ip_info = "127.0.0.1:0"
    for name, value in options.items():
        setattr(config, name, value)
    made = LLMDataDist(LLMRole.MIX, cluster_id)
    made.init(config.generate_options())
    return made


def own(pipe: Connection, every: list[Options]) -> None:
    """In the other process: one memory, in one engine for each kind."""
    memory = np.random.default_rng(1).integers(0, 256, TOTAL, dtype=np.uint8)
    engines = [engine(number, options, listen=True) for number, options in enumerate(every, 1)]
    for number, one in enumerate(engines, 1):
        one.cache_manager.register_blocks_cache(DESC, [memory.ctypes.data], BlocksCacheKey(number, 0))
    pipe.send([one.listen_address for one in engines])
    pipe.recv()
    for one in engines:
        one.finalize()


class Caller:
    """This end of one kind."""

    def __init__(self, number: int, options: Options, address: tuple[str, int], memory: np.ndarray, owner: int) -> None:
        self._owner = owner
        self._key = BlocksCacheKey(number, 0)
        self._engine = engine(100 + number, options, listen=False)
        self._cache: Cache = self._engine.cache_manager.register_blocks_cache(DESC, [memory.ctypes.data])
        info = LLMClusterInfo()
        info.remote_cluster_id = number
        info.append_local_ip_info("127.0.0.1", 0)
        info.append_remote_ip_info(*address)
        self._info = [info]
        self.link_ms: list[float] = []
        self.large: list[float] = []
        self.cpu: list[float] = []
        self.small: list[float] = []
        self._link()

    def _link(self) -> None:
        begin = time.perf_counter()
        code, _ = self._engine.link_clusters(self._info, 30_000)
        self.link_ms.append((time.perf_counter() - begin) * 1e3)
        if code:
            sys.exit(f"no link: {code}")

    def round(self) -> None:
        """Link anew, then one large pull and many small ones."""
        self._engine.unlink_clusters(self._info, 30_000)
        self._link()
        pull = self._engine.cache_manager.pull_blocks
        pull(self._key, self._cache, EVERY, EVERY)  # what the first one needs is in place
        used = self._cpu_s()
        begin = time.perf_counter()
        for _ in range(LARGE):
            pull(self._key, self._cache, EVERY, EVERY)
        middle = time.perf_counter()
        self.cpu.append((self._cpu_s() - used) / (LARGE * TOTAL / 1e9))
        for at in range(SMALL):
            pull(self._key, self._cache, [at], [at])
        end = time.perf_counter()
        self.large.append(LARGE * TOTAL / (middle - begin) / 1e9)
        self.small.append((end - middle) / SMALL * 1e6)

    def _cpu_s(self) -> float:
        """Of both processes."""
        ticks = Path(f"/proc/{self._owner}/stat").read_text().rpartition(")")[2].split()[11:13]
        return time.process_time() + sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End it."""
        self._engine.finalize()


def ratio(some: list[float], base: list[float]) -> str:
    """The median of the ratios of equal rounds, and how far they go."""
    each = sorted(one / other for one, other in zip(some, base, strict=True))
    return f"{statistics.median(each):.2f}x ({each[0]:.2f}..{each[-1]:.2f})"


def main() -> None:
    """Measure in turns, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="certificate, key and CA; without them TLS is left out")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    compared = kinds(arguments.files)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=own, args=(theirs, list(compared.values())), daemon=True)
    owner.start()
    addresses = ours.recv()
    memory = np.zeros(TOTAL, dtype=np.uint8)
    callers = [
        Caller(number, options, address, memory, owner.pid or 0)
        for number, (options, address) in enumerate(zip(compared.values(), addresses, strict=True), 1)
    ]
    for _ in range(arguments.rounds):
        for caller in callers:
            caller.round()
    lines = [
        f"pull_blocks over tcp, {BLOCKS} blocks of {BLOCK >> 10} KiB; medians of {arguments.rounds} rounds",
        "",
        "| | link | 128 MiB | against plain | CPU time of both | against plain | one block | against plain |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, caller in zip(compared, callers, strict=True):
        lines.append(f"| {name} | {statistics.median(caller.link_ms):.1f} ms |")
        for unit, figures, base in (
            ("GB/s", caller.large, callers[0].large),
            ("s/GB", caller.cpu, callers[0].cpu),
            ("us", caller.small, callers[0].small),
        ):
            lines[-1] += f" {statistics.median(figures):.3g} {unit} | {ratio(figures, base)} |"
    sys.stdout.write("\n".join(lines) + "\n")
    for caller in callers:
        caller.close()
    ours.send(None)
    owner.join(30)


if __name__ == "__main__":
    main()
