"""Does GPU memory work? Two processes share one GPU; every operation and placement is verified, then measured.

**It has not run on a GPU yet**: no machine with one was at hand. ``--host-only`` runs all of it but the CUDA calls,
with host memory in the place of that of the GPU; the tests do that.

On a machine with one NVIDIA GPU, torch and this package with the extra ``nixl``, unattended, in less than 8 minutes::

    python benchmarks/gpu_check.py --json gpu_check.json

First come the operations (pull and push, blocks and batch entries, layer by layer with CUDA events) for host and device
memory at either end: every byte of the destination is compared with what it must be. Then bandwidth: the same block
lists by this library and by bare NIXL, and a plain copy by torch. The table and the JSON come at the end, whatever
happened before. Exit status: 0 if all is well, 1 if something is wrong, 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import importlib
import itertools
import json
import os
import platform
import signal
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpu_member import BLOCK_BYTES, BLOCKS, BULK_BLOCKS, MODELS, PLACES, Member, Partner
from gpu_memory import TENSORS, WAIT_S, CudaLayers, HostLayers

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    LLMClusterInfo,
    LLMException,
    LLMStatusCode,
    Placement,
    TransferWithCacheKeyConfig,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Runs = list[tuple[int, int, int]]

FEW: Final = ([3, 1], [0, 9])
MANY: Final = (list(range(BLOCKS - 1)), list(range(BLOCKS - 1, 0, -1)))
"""Source and destination blocks; block 0 is no destination, so that there is a neighbour that must not change."""
MOST_ROUNDS: Final = 20
LEAST_MIB: Final = 4
SERVER, CLIENT = 1, 2


def runs_of(sources: Sequence[int], targets: Sequence[int], size: int = BLOCK_BYTES) -> Runs:
    """Where the bytes of blocks come from, and where they go."""
    return [(source * size, target * size, size) for source, target in zip(sources, targets, strict=True)]


@dataclass(frozen=True)
class Row:
    """One result."""

    what: str
    here: str
    there: str
    ok: bool
    gib_s: float | None = None
    detail: str = ""


class Check:
    """The whole check, from the process that drives it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rows: list[Row] = []
        self.explained = ""
        self._seeds = itertools.count(1)
        bulk = options.mib << 20
        self._paths = options.paths or ("auto" if options.host_only else "process_vm,nixl,tcp")
        arguments = (options.host_only, bulk, self._paths)
        self.host_only: bool = options.host_only
        self._round_s: float = options.round_s
        self.partner = Partner(options.limit_s + 10, SERVER, *arguments)
        self.member = Member(CLIENT, *arguments)

    def run(self) -> Iterator[str]:
        """Make it, step by step; tells what comes next."""
        yield "start"
        address = self.partner.call("start", "127.0.0.1:0")
        self.member.start(None)
        info = LLMClusterInfo()
        info.remote_cluster_id = SERVER
        info.append_local_ip_info("127.0.0.1", 0)
        info.append_remote_ip_info(*address)
        _, (status,) = self.member.datadist.link_clusters([info], int(WAIT_S * 1000))
        if status != LLMStatusCode.LLM_SUCCESS:
            message = f"the processes cannot be linked: {self.member.datadist.last_link_error(SERVER)}"
            raise RuntimeError(message)
        if not self.host_only:
            self._placements()
        for here, there in itertools.product(PLACES, PLACES):
            yield f"operations, {here} here, {there} there"
            self._operations(here, there)
        self.explained = str(self.member.datadist.explain_link(SERVER))
        for label, block_bytes in BULK_BLOCKS.items():
            self.partner.call("cut_bulk", block_bytes)
            self.member.cut_bulk(block_bytes)
            for here, there in itertools.product(PLACES, PLACES):
                yield f"bandwidth, blocks of {label}, {here} here, {there} there"
                self._bandwidth(label, block_bytes, here, there)

    def _placements(self) -> None:
        """A placement that does not say where memory is must be refused."""
        for place, wrong in (("host", Placement.DEVICE), ("device", Placement.HOST)):
            desc = CacheDesc(TENSORS, [BLOCKS, BLOCK_BYTES], DataType.DT_UINT8, wrong)
            detail = "it was accepted"
            try:
                self.member.manager.register_blocks_cache(desc, self.member.memory[f"blocks {place}"].addresses)
            except LLMException as error:
                detail = "" if "placement is" in str(error) else str(error)
            self.rows.append(Row(f"register it as {wrong.name}", place, "", ok=not detail, detail=detail))

    def _operations(self, here: str, there: str) -> None:
        entries = BLOCKS // 2
        ours, manager = self.member.caches, self.member.manager
        key = BlocksCacheKey(SERVER, MODELS[f"blocks {there}"])
        for name, (sources, targets) in (("few", FEW), ("many", MANY)):
            runs = runs_of(sources, targets)
            cache = ours[f"blocks {here}"]
            pull = functools.partial(manager.pull_blocks, key, cache, sources, targets)
            self._verify(f"pull_blocks, {name}", ("blocks", here), ("blocks", there), pull, runs)
            push = functools.partial(manager.push_blocks, key, cache, sources, targets)
            self._verify(f"push_blocks, {name}", ("blocks", here), ("blocks", there), push, runs, pull=False)
        entry = CacheKeyByIdAndIndex(SERVER, self.partner.call("cache_id", f"entries {there}"), 1)
        size = entries * BLOCK_BYTES
        pull = functools.partial(manager.pull_cache, entry, ours[f"entries {here}"], 0)
        self._verify("pull_cache", ("entries", here), ("entries", there), pull, [(size, 0, size)])
        push = functools.partial(manager.push_cache, entry, ours[f"entries {here}"], 0)
        self._verify("push_cache", ("entries", here), ("entries", there), push, [(0, size, size)], pull=False)
        cut = functools.partial(manager.pull_blocks, entry, ours[f"blocks {here}"], dst_blocks=list(range(entries)))
        runs = [(size, 0, size)]
        self._verify("pull_blocks of an entry", ("blocks", here), ("entries", there), cut, runs)
        if here == "device":
            sources, targets = MANY
            runs = runs_of(sources, targets)
            layers = functools.partial(self._layers, key, ours[f"blocks {here}"])
            self._verify("transfer_cache_async", ("blocks", here), ("blocks", there), layers, runs, pull=False)

    def _layers(self, key: BlocksCacheKey, cache: Any) -> None:
        """Layer by layer, each released when it has been "computed"."""
        count = TENSORS // 2
        ready = HostLayers(count) if self.host_only else CudaLayers(count)
        config = TransferWithCacheKeyConfig(key, range(count), range(count))
        task = self.member.manager.transfer_cache_async(cache, ready, [config], *MANY)
        for layer in range(count):
            ready.done(layer)
        status = task.synchronize(int(WAIT_S * 1000))
        if status != LLMStatusCode.LLM_SUCCESS:
            raise (task.get_errors() or [RuntimeError(str(status))])[0]

    def _verify(
        self,
        what: str,
        near: tuple[str, str],
        far: tuple[str, str],
        move: Callable[[], object],
        runs: Runs,
        *,
        pull: bool = True,
    ) -> None:
        """Fill both sides, move, and compare every byte of both with what it must be."""
        ours, theirs, near_seed, far_seed = " ".join(near), " ".join(far), next(self._seeds), next(self._seeds)
        try:
            self.member.fill(ours, near_seed)
            self.partner.call("fill", theirs, far_seed)
            for _ in range(2):  # the second time it may take the short way of small transfers
                move()
            if pull:
                wrong = self.member.differs(ours, near_seed, far_seed, runs) + self.partner.call(
                    "differs", theirs, far_seed
                )
            else:
                wrong = self.partner.call("differs", theirs, far_seed, near_seed, runs) + self.member.differs(
                    ours, near_seed
                )
            detail = f"{wrong} bytes are wrong" if wrong else ""
        except Exception as error:  # noqa: BLE001 - a row of the report
            detail = f"{type(error).__name__}: {error}"
        self.rows.append(Row(what, near[1], far[1], ok=not detail, detail=detail))

    def _bandwidth(self, label: str, block_bytes: int, here: str, there: str) -> None:
        blocks = self.member.bulk_bytes // TENSORS // block_bytes
        sources, targets = list(range(blocks)), list(reversed(range(blocks)))
        key, cache = BlocksCacheKey(SERVER, MODELS[f"bulk {there}"]), self.member.caches[f"bulk {here}"]
        manager, total = self.member.manager, self.member.bulk_bytes
        for name, operation in (("pull_blocks", manager.pull_blocks), ("push_blocks", manager.push_blocks)):
            move = functools.partial(operation, key, cache, sources, targets)
            self._measure(f"{name}, {label}", here, there, total, lambda move=move: move)
        runs = runs_of(targets, sources, block_bytes)
        for name in ("READ", "WRITE"):
            prepare = functools.partial(self._bare_nixl, name, here, there, runs)
            self._measure(f"bare NIXL {name}, {label}", here, there, total, prepare, optional=True)
        if label == next(iter(BULK_BLOCKS)):
            into, source = self.member.memory[f"bulk {here}"], self.member.memory[f"bulk {there}"]
            spare = type(source)(TENSORS, total // TENSORS) if source is into else source
            copy = functools.partial(into.copy_from, spare)
            self._measure("plain copy", here, there, total, lambda: copy)

    def _bare_nixl(self, name: str, here: str, there: str, runs: Runs) -> Callable[[], object]:
        about = self.partner.call("open_nixl", there)
        self.member.open_nixl(here)
        mover: Callable[[], object] = self.member.nixl[here].mover(name, about, runs)
        return mover

    def _measure(
        self,
        what: str,
        here: str,
        there: str,
        total: int,
        prepare: Callable[[], Callable[[], object]],
        *,
        optional: bool = False,
    ) -> None:
        """The median of some rounds; without what is ``optional`` all can be well."""
        rounds: list[float] = []
        try:
            move = prepare()
            move()  # what is made on first use is made
            end = time.perf_counter() + self._round_s
            while len(rounds) < MOST_ROUNDS and (not rounds or time.perf_counter() < end):
                begun = time.perf_counter()
                move()
                rounds.append(time.perf_counter() - begun)
        except Exception as error:  # noqa: BLE001 - a row of the report
            detail = f"{type(error).__name__}: {error}"
            self.rows.append(Row(what, here, there, ok=optional, detail=detail))
            return
        speed = total / statistics.median(rounds) / (1 << 30)
        self.rows.append(Row(what, here, there, ok=True, gib_s=round(speed, 3), detail=f"{len(rounds)} rounds"))

    def close(self) -> None:
        """End both processes."""
        with contextlib.suppress(Exception):
            self.member.stop()
        self.partner.close()


def machine(*, host_only: bool) -> dict[str, Any]:
    """What it ran on."""
    facts: dict[str, Any] = {"python": platform.python_version(), "kernel": platform.release(), "cpus": os.cpu_count()}
    if not host_only:
        torch = importlib.import_module("torch")
        facts |= {"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": torch.cuda.get_device_name(0)}
    return facts


def has_gpu() -> bool:
    """Whether torch sees one."""
    try:
        return bool(importlib.import_module("torch").cuda.is_available())
    except ImportError:
        return False


def table(rows: list[Row]) -> Iterator[str]:
    """For people."""
    yield f"{'what':<32} {'here':<7} {'there':<7} {'':<6} {'GiB/s':>8}  detail"
    for row in rows:
        speed = "" if row.gib_s is None else f"{row.gib_s:8.2f}"
        state = "FAILED" if not row.ok else "ok" if row.gib_s is not None or not row.detail else "-"
        yield f"{row.what:<32} {row.here:<7} {row.there:<7} {state:<6} {speed:>8}  {row.detail}"


def _mib(text: str) -> int:
    value = int(text)
    if value < LEAST_MIB or value % LEAST_MIB:
        message = f"{value} is not a positive multiple of {LEAST_MIB}"
        raise argparse.ArgumentTypeError(message)
    return value


def _target(text: str) -> Path:
    """Where results can be written: better known now than in eight minutes."""
    target = Path(text)
    if target.is_dir() or not target.parent.is_dir():
        message = f"{text} cannot be written: it is a folder, or in none that exists"
        raise argparse.ArgumentTypeError(message)
    return target


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host-only", action="store_true", help="host memory in the place of that of the GPU")
    parser.add_argument("--json", type=_target, help="where to write the results, too")
    parser.add_argument("--limit-s", type=float, default=420.0, help="give up after so many seconds")
    parser.add_argument(
        "--mib", type=_mib, default=256, help="size of what bandwidth is measured with, a multiple of 4"
    )
    parser.add_argument("--round-s", type=float, default=1.5, help="how long each bandwidth is measured")
    parser.add_argument("--paths", help="LLMConfig.paths of both processes")
    return parser.parse_args()


class TimeIsOver(BaseException):
    """The limit of the whole check has come."""


def _too_late(*_: object) -> None:
    message = "its time was over before all was checked"
    raise TimeIsOver(message)


def main() -> int:
    """Check, report; the exit status."""
    options = _parse()
    if not options.host_only and not has_gpu():
        sys.stderr.write("torch sees no GPU here: nothing was checked (--host-only checks the script itself)\n")
        return 2
    if not Path("/sys/class/infiniband").exists():
        os.environ.setdefault("UCX_MODULES", "^ib")  # else UCX crashes at the end of a process
    begun, failure = time.monotonic(), ""
    faulthandler.dump_traceback_later(options.limit_s + 15, exit=True)  # should a library never return
    signal.signal(signal.SIGALRM, _too_late)
    signal.setitimer(signal.ITIMER_REAL, options.limit_s)
    check = Check(options)
    try:
        for step in check.run():
            sys.stderr.write(f"{time.monotonic() - begun:6.1f} s  {step}\n")
    except KeyboardInterrupt:
        failure = "it was interrupted before all was checked"
    except (Exception, TimeIsOver) as error:  # noqa: BLE001 - it is reported, with what there is
        failure = f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        check.close()
    passed = not failure and all(row.ok for row in check.rows)
    report = {
        "passed": passed,
        "failure": failure,
        "host_only": options.host_only,
        "seconds": round(time.monotonic() - begun, 1),
        "machine": machine(host_only=options.host_only),
        "link": check.explained,
        "rows": [asdict(row) for row in check.rows],
    }
    where = "host memory alone, no GPU" if options.host_only else report["machine"]["gpu"]
    lines = [check.explained, *table(check.rows), failure, f"{'passed' if passed else 'FAILED'} ({where})"]
    sys.stdout.write("\n".join(filter(None, lines)) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    else:
        sys.stdout.write(json.dumps(report) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # see ``_serve``
