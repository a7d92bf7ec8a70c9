"""The region table: ids, leases, epochs, bounds, and what peers see of it."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_datadist.memory.regions import (
    CAPACITY,
    MAGIC,
    NONCE_BYTES,
    ROW_BYTES,
    RegionError,
    RegionTable,
    RegionView,
    UnknownRegionError,
)
from llm_datadist.utils.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    U64 = NDArray[np.uint64]
    I64 = NDArray[np.int64]

WAIT_S = 10.0
FDS = Path("/proc/self/fd")


def u64(*values: int) -> U64:
    return np.array(values, dtype=np.uint64)


def i64(*values: int) -> I64:
    return np.array(values, dtype=np.int64)


def span(view: RegionView, region: int, offset: int, length: int) -> int:
    """Where these bytes of one region are; both ways to ask must agree."""
    extent = offset, offset + length
    quick = view.base(region, 0, extent) + offset
    assert int(view.bases(u64(region), i64(0), extent)[0]) + offset == quick
    return quick


def expect_both(
    error: type[RegionError],
    view: RegionView,
    region: int,
    start: int,
    extent: tuple[int, int],
    text: str | None = None,
) -> None:
    """Both ways to ask for a region raise exactly this."""
    for call in (lambda: view.base(region, start, extent), lambda: view.bases(u64(region), i64(start), extent)):
        with pytest.raises(error, match=text) as caught:
            call()
        assert type(caught.value) is error


@pytest.fixture
def view(table: RegionTable) -> Iterator[RegionView]:
    """The table as another process sees it: mapped from its file."""
    seen = RegionView.of_file(f"/proc/self/fd/{table.fd}")
    yield seen
    seen.close()


# Ids


def test_an_id_is_never_used_again_though_its_slot_is(table: RegionTable) -> None:
    seen = {table.probe_region}
    slots = set()
    for _ in range(500):
        region = table.add(0x1000, 16)
        assert region > max(seen)
        seen.add(region)
        slots.add(region & 0xFFFF)
        table.remove([region])
    assert len(slots) == 1
    assert 0 not in seen


def test_the_same_memory_twice_is_two_regions(table: RegionTable, view: RegionView) -> None:
    first, second = table.add(0x1000, 16), table.add(0x1000, 16)
    assert first != second
    table.remove([first])
    assert span(view, second, 4, 12) == 0x1004
    expect_both(UnknownRegionError, view, first, 4, (0, 12))


def test_the_old_id_of_a_slot_stays_dead(table: RegionTable, view: RegionView) -> None:
    old = table.add(0x1000, 16)
    table.remove([old])
    new = table.add(0x2000, 16)
    assert old & 0xFFFF == new & 0xFFFF
    table.remove([old])
    assert view.still_live(u64(new))
    assert not view.still_live(u64(new, old))
    with pytest.raises(UnknownRegionError, match=f"region {old:#x} is not registered"):
        view.bases(u64(new, old), i64(0, 0), (0, 1))
    expect_both(UnknownRegionError, view, old, 0, (0, 1), f"region {old:#x} is not registered")
    with pytest.raises(UnknownRegionError), table.lease([old]):
        pass


@pytest.mark.parametrize("nobody", [0, 1, 1 << 16, MAGIC, 2**64 - 1, 77 << 16 | 3])
def test_ids_that_were_never_given(table: RegionTable, view: RegionView, nobody: int) -> None:
    table.remove([nobody])
    assert view.still_live(u64(table.probe_region))
    expect_both(UnknownRegionError, view, nobody, 0, (0, 0))
    with pytest.raises(UnknownRegionError), table.lease([table.probe_region, nobody]):
        pass


def test_the_table_is_full_once_and_usable_afterwards(table: RegionTable, view: RegionView) -> None:
    added = [table.add(n << 12, 4096) for n in range(CAPACITY - 2)]
    assert len({region & 0xFFFF for region in added}) == CAPACITY - 2
    for _ in range(2):
        with pytest.raises(RegionError, match=f"all {CAPACITY - 1} region slots .* unregister caches first"):
            table.add(0x1000, 16)
    assert span(view, added[-1], 1, 1) == ((CAPACITY - 3) << 12) + 1
    table.remove([added[5], added[7]])
    for _ in range(2):
        assert table.add(0x1000, 16) not in added
    with pytest.raises(RegionError):
        table.add(0x1000, 16)


# Epochs


def test_only_changes_that_make_earlier_knowledge_wrong_move_the_epoch(table: RegionTable, view: RegionView) -> None:
    before = table.epoch
    assert before >= 1  # 0 means "do not check"
    region = table.add(0x1000, 16)
    with table.lease([region]):
        assert table.epoch == view.epoch == before
    table.remove([region])
    assert table.epoch == view.epoch == before + 1
    assert table.invalidate() == before + 2
    assert table.epoch == view.epoch == before + 2


# Bounds


@pytest.mark.parametrize(
    ("start", "low", "high"),
    [
        (0, 0, 101),
        (100, 0, 1),
        (100, 1, 2),
        (101, 0, 0),
        (-1, 0, 1),
        (0, -1, 1),
        (1, 0, 100),
        (50, 0, 2**63 - 1),
        (2**63 - 1, 0, 1),
        (-(2**63), 0, 0),
        (1, 2**63 - 1, 2**63 - 1),
    ],
)
def test_bytes_outside_their_region(table: RegionTable, view: RegionView, start: int, low: int, high: int) -> None:
    region = table.add(0x1000, 100)
    text = rf"bytes \[{start + low}, {start + high}\) reach outside their region of 100 bytes"
    for seen in (view, RegionView(table.rows)):
        expect_both(RegionError, seen, region, start, (low, high), text)


def test_the_tensor_that_does_not_fit_is_named(table: RegionTable, view: RegionView) -> None:
    large, small = table.add(0x1000, 100), table.add(0x2000, 60)
    assert view.bases(u64(large, small), i64(40, 0), (0, 60)).tolist() == [0x1028, 0x2000]
    with pytest.raises(RegionError, match=r"bytes \[0, 61\) reach outside their region of 60 bytes"):
        view.bases(u64(large, small, large), i64(0, 0, 39), (0, 61))


@settings(max_examples=300, deadline=None)
@given(
    base=st.integers(0, 2**62),
    size=st.integers(0, 2**62),
    starts=st.lists(
        st.one_of(st.integers(-3, 20), st.integers(-(2**62), 2**62)),
        min_size=1,
        max_size=5,
    ),
    extent=st.tuples(
        st.one_of(st.integers(-3, 20), st.integers(-(2**62), 2**62)),
        st.one_of(st.integers(0, 20), st.integers(0, 2**62)),
    ),
    tight=st.booleans(),
)
def test_bounds_are_those_of_whole_numbers(
    base: int, size: int, starts: list[int], extent: tuple[int, int], tight: bool
) -> None:
    low, high = extent[0], extent[0] + extent[1]
    if tight:  # around the end of the region
        low, high = abs(low) % 20, abs(low) % 20 + extent[1] % 20
        starts = [max(0, size - start % 40) for start in starts]
    rows = np.zeros((16, 4), dtype=np.uint64)
    rows[9] = (1 << 16 | 9, base, size, 1)
    view, region = RegionView(rows), 1 << 16 | 9
    good = [start >= 0 and low >= 0 and start <= size and start + high <= size for start in starts]
    if all(good):
        assert view.bases(u64(*[region] * len(starts)), i64(*starts), (low, high)).tolist() == [
            base + at for at in starts
        ]
    else:
        with pytest.raises(RegionError):
            view.bases(u64(*[region] * len(starts)), i64(*starts), (low, high))
    for start, fits in zip(starts, good, strict=True):
        if fits:
            assert view.base(region, start, (low, high)) == base + start
        else:
            with pytest.raises(RegionError):
                view.base(region, start, (low, high))


def test_region_that_is_not_for_peers() -> None:
    """It may be held by this process, but no span of a peer may name it, nor an address."""
    table = RegionTable()
    region = table.add(4096, 100, reachable=False)
    view = RegionView(table.rows)
    with table.lease([region]):
        expect_both(RegionError, view, region, 0, (0, 1), "not remote accessible")
        with pytest.raises(RegionError, match="not remote accessible"):
            view.find(region)
        with pytest.raises(RegionError, match="not remote accessible"):
            view.bases(u64(table.probe_region, region), i64(0, 0), (0, 1))
    assert table.find(4096, 1) is None
    table.close()


def test_many_tensors(table: RegionTable, view: RegionView) -> None:
    bases = [2**40 + n * 2**33 for n in range(50)]
    ids = [table.add(base, 2**33) for base in bases]
    starts = [2**32 + 8 * n for n in range(50)]
    assert view.bases(u64(*ids), i64(*starts), (0, 4096)).tolist() == [
        base + start for base, start in zip(bases, starts, strict=True)
    ]
    assert [view.find(region) for region in ids] == [(base, 2**33) for base in bases]
    assert view.edges(ids) == [edge for base in bases for edge in (base, base + 2**33 - 1)]


def test_no_tensors(view: RegionView) -> None:
    assert len(view.bases(u64(), i64(), (0, 0))) == 0
    assert view.still_live(u64())
    assert view.edges([]) == []


# find


def test_find_tells_region_and_offset(table: RegionTable) -> None:
    region = table.add(0x10_0000, 4096)
    other = table.add(0x20_0000, 2**40)
    assert table.find(0x10_0000, 4096) == (region, 0)
    assert table.find(0x10_0FFF, 1) == (region, 4095)
    assert table.find(0x20_0000 + 2**39, 2**39) == (other, 2**39)


@pytest.mark.parametrize(
    ("address", "size"),
    [
        (0x10_0000, 4097),
        (0x0F_FFFF, 2),
        (0x10_1000, 1),
        (0, 1),
        (0x10_0000, 2**62),
        (2**64 - 1, 1),
        (2**64 - 1, 2),
        (2**64 - 8, 2**63),
        (0x10_0000, 2**64 - 0x10_0000 + 8),
    ],
)
def test_find_knows_no_region_that_holds_it_all(table: RegionTable, address: int, size: int) -> None:
    table.add(0x10_0000, 4096)
    table.add(0x10_2000, 4096)
    assert table.find(address, size) is None


def test_find_needs_one_region_for_all_and_a_live_one(table: RegionTable) -> None:
    first, second = table.add(0x10_0000, 4096), table.add(0x10_1000, 4096)
    assert table.find(0x10_0800, 4096) is None
    table.remove([first])
    assert table.find(0x10_0000, 8) is None
    assert table.find(0x10_1000, 8) == (second, 0)


# Leases


def test_all_regions_that_hold_a_byte(table: RegionTable) -> None:
    whole, part, hidden = table.add(4096, 100), table.add(4146, 10), table.add(4096, 51, reachable=False)
    assert table.at(4095) == []
    assert table.at(4096) == [whole, hidden]
    assert table.at(4146) == [whole, part, hidden]
    assert table.at(4155) == [whole, part]
    assert table.at(4196) == []
    table.remove([whole])
    assert table.at(4146) == [part, hidden]


def test_wait_unused_waits_for_the_last_lease(table: RegionTable) -> None:
    used, idle = table.add(0x1000, 16), table.add(0x2000, 16)
    assert table.wait_unused([used, idle], Deadline.after(0))
    with table.lease([used, used]), table.lease([used]):
        assert not table.wait_unused([used], Deadline.after(0))
        assert not table.wait_unused([idle, used], Deadline.after(0.01))
        assert table.wait_unused([idle], Deadline.after(WAIT_S))
        table.remove([used])
        assert not table.wait_unused([used], Deadline.after(0))
    assert table.wait_unused([used], Deadline.after(0))


def test_wait_unused_wakes_when_the_lease_ends(table: RegionTable) -> None:
    region = table.add(0x1000, 16)
    held, let_go = threading.Event(), threading.Event()

    def use() -> None:
        with table.lease([region]):
            held.set()
            let_go.wait(WAIT_S)

    user = threading.Thread(target=use)
    user.start()
    assert held.wait(WAIT_S)
    results: list[bool] = []
    waiter = threading.Thread(target=lambda: results.append(table.wait_unused([region], Deadline.after(10 * WAIT_S))))
    waiter.start()
    let_go.set()
    waiter.join(WAIT_S)
    user.join(WAIT_S)
    assert results == [True]


def test_a_lease_ends_with_an_error_too(table: RegionTable) -> None:
    region = table.add(0x1000, 16)
    with pytest.raises(KeyError), table.lease([region]):
        raise KeyError
    assert table.wait_unused([region], Deadline.after(0))


def test_a_lease_of_a_dead_region_holds_none_of_the_others(table: RegionTable) -> None:
    live, dead = table.add(0x1000, 16), table.add(0x2000, 16)
    table.remove([dead])
    with pytest.raises(UnknownRegionError, match=f"{dead:#x}"), table.lease([live, dead]):
        pass
    assert table.wait_unused([live], Deadline.after(0))


# The probe, and views


def test_the_nonce_is_what_the_probe_region_holds(table: RegionTable, view: RegionView) -> None:
    address = span(view, table.probe_region, 0, NONCE_BYTES)
    assert ctypes.string_at(address, NONCE_BYTES) == table.nonce
    other = RegionTable()
    assert other.nonce != table.nonce
    other.close()


def test_a_view_sees_changes_at_once_and_cannot_make_any(table: RegionTable, view: RegionView) -> None:
    assert view.alive
    region = table.add(0x1000, 16)
    assert view.still_live(u64(region))
    table.remove([region])
    assert not view.still_live(u64(region))
    with pytest.raises(ValueError, match="read-only"):
        view._rows[0, 0] = 1


def test_another_process_sees_the_table(table: RegionTable) -> None:
    region = table.add(0x1000, 16)
    code = (
        "import sys\n"
        "from llm_datadist.memory.regions import RegionView\n"
        "view = RegionView.of_file(sys.argv[1])\n"
        "print(view.alive, view.epoch, hex(view.base(int(sys.argv[2]), 8, (0, 8))))\n"
    )
    argv = [sys.executable, "-c", code, f"/proc/{os.getpid()}/fd/{table.fd}", str(region)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["True", str(table.epoch), "0x1008"], done.stderr


def test_close_is_the_end_for_everybody(table: RegionTable, view: RegionView) -> None:
    region, same_process = table.add(0x1000, 16), RegionView(table.rows)
    fd = table.fd
    table.close()
    table.close()
    assert not view.alive
    assert not same_process.alive
    assert not view.still_live(u64(region))
    expect_both(UnknownRegionError, view, region, 0, (0, 1))
    with pytest.raises(UnknownRegionError), table.lease([region]):
        pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_close_of_a_view_is_idempotent_and_nothing_is_live_in_it(table: RegionTable) -> None:
    seen = RegionView.of_file(f"/proc/self/fd/{table.fd}")
    region = table.add(0x1000, 16)
    seen.close()
    seen.close()
    assert not seen.alive
    assert not seen.still_live(u64(region))
    expect_both(UnknownRegionError, seen, region, 0, (0, 1))


def test_a_view_outlives_the_descriptor_it_came_from(table: RegionTable, view: RegionView) -> None:
    gc.collect()  # what other tests have left is not counted
    before = len(list(FDS.iterdir()))
    more = [RegionView.of_file(f"/proc/self/fd/{table.fd}") for _ in range(10)]
    for each in more:
        each.close()
    assert len(list(FDS.iterdir())) <= before
    assert view.alive


def test_files_that_are_not_a_table(tmp_path: Path) -> None:
    for name, content in (("empty", b""), ("short", b"x" * 4096), ("zeros", bytes(CAPACITY * ROW_BYTES))):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(RegionError, match=f"{name} is not a sealed region table"):
            RegionView.of_file(str(path))
    with pytest.raises(FileNotFoundError):
        RegionView.of_file(str(tmp_path / "missing"))


def test_the_file_cannot_be_cut_under_a_peer(table: RegionTable) -> None:
    assert os.fstat(table.fd).st_size == ROW_BYTES * CAPACITY
    for size in (0, 4096, 2 * CAPACITY * ROW_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(table.fd, size)
    with mmap.mmap(table.fd, CAPACITY * ROW_BYTES, prot=mmap.PROT_READ) as mapped:
        assert int.from_bytes(mapped[:8], "little") == MAGIC


def test_threads_add_and_remove_at_the_same_time(table: RegionTable) -> None:
    def churn(seen: list[int]) -> None:
        for _ in range(300):
            mine = [table.add(0x1000, 16) for _ in range(3)]
            seen.extend(mine)
            with table.lease(mine):
                pass
            table.remove(mine)

    lists: list[list[int]] = [[] for _ in range(4)]
    threads = [threading.Thread(target=churn, args=(seen,)) for seen in lists]
    before = table.epoch
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    everything = [region for seen in lists for region in seen]
    assert len(everything) == len(set(everything)) == 3600
    assert table.epoch == before + 1200
