"""The catalogue: ids, keys, lifetimes and the published snapshot (core specification, sections 1.3 to 1.6)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_datadist.engine.catalogue import CacheEntry, Catalogue, DuplicateKeyError, geometry_of, info_of
from llm_datadist.engine.requests import BlocksKey, CacheKind, CacheSpec, IdKey, PrefixKey, RequestKey
from llm_datadist.layout.plan import Geometry
from llm_datadist.memory.regions import CAPACITY, RegionError, RegionTable, RegionView
from llm_datadist.utils.deadline import Deadline
from llm_datadist.wire.messages import KeyInfo, KeyRef

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llm_datadist.engine.requests import Key

WAIT_S = 10.0
CONTIGUOUS, BLOCKS, MIXED = CacheKind.CONTIGUOUS, CacheKind.BLOCKS, CacheKind.MIXED


def spec(kind: CacheKind = CONTIGUOUS, tensors: int = 2, shape: tuple[int, ...] = (4, 8)) -> CacheSpec:
    return CacheSpec(num_tensors=tensors, shape=shape, item_size=2, dtype="half", on_device=True, kind=kind)


class Fixture:
    """A catalogue and its region table."""

    def __init__(self) -> None:
        self.regions = RegionTable()
        self.catalogue = Catalogue(self.regions)

    def add(
        self,
        *keys: Key | None,
        kind: CacheKind = CONTIGUOUS,
        owned: bool = False,
        tensors: int = 2,
        accessible: bool = True,
    ) -> CacheEntry:
        addrs = np.arange(1, tensors + 1, dtype=np.uint64) * np.uint64(1 << 20)
        return self.catalogue.add(
            self.catalogue.next_id(), spec(kind, tensors), addrs, keys, accessible=accessible, owned=owned
        )

    def find(self, **names: int | bool) -> tuple[int, int]:
        """(cache id, batch index) of what a peer names; not held."""
        entry, index, _ = self.catalogue.find(KeyRef(**names))  # type: ignore[arg-type]
        self.catalogue.unpin(entry)
        return entry.cache_id, index

    def released(self, **names: int | bool) -> RequestKey | None:
        """The key that a successful pull by this name releases."""
        entry, _, key = self.catalogue.find(KeyRef(**names))  # type: ignore[arg-type]
        self.catalogue.unpin(entry)
        return key

    def take_back(self, entry: CacheEntry) -> None:
        assert self.catalogue.wait_unpinned_after_hiding(entry, Deadline.after(0))
        self.regions.remove(int(region) for region in entry.regions)
        self.catalogue.forget(entry)


@pytest.fixture
def here() -> Iterator[Fixture]:
    made = Fixture()
    yield made
    made.regions.close()


# 1.2, 1.3: geometry and ids


def test_ids_count_from_1_over_both_kinds_and_a_failure_burns_one(here: Fixture) -> None:
    assert here.add().cache_id == 1
    assert here.add(RequestKey(5), owned=True).cache_id == 2
    with pytest.raises(DuplicateKeyError):
        here.add(RequestKey(5), owned=True)
    fourth = here.add(kind=BLOCKS)
    assert fourth.cache_id == 4
    here.take_back(fourth)
    assert here.add().cache_id == 5
    assert here.catalogue.get(4) is None


def test_geometry() -> None:
    assert geometry_of(spec(shape=(4, 8, 3))) == Geometry(4 * 8 * 3 * 2, 4)
    huge = CacheSpec(1, (2**20, 2**20, 2**10), 4, "f", on_device=False, kind=BLOCKS)
    assert geometry_of(huge) == Geometry(2**52, 2**20)
    assert geometry_of(huge).stride == 2**32


@pytest.mark.parametrize(
    ("kind", "batches", "has_blocks"), [(CONTIGUOUS, 4, False), (BLOCKS, 1, True), (MIXED, 4, True)]
)
def test_kinds_may_be_addressed_like_this(here: Fixture, kind: CacheKind, batches: int, has_blocks: bool) -> None:
    entry = here.add(kind=kind)
    assert (entry.batch_entries, entry.has_blocks) == (batches, has_blocks)
    for index in range(batches):
        assert here.find(cache_id=entry.cache_id, batch_index=index) == (entry.cache_id, index)
    for index in (batches, 2**32 - 1):
        with pytest.raises(KeyError):
            here.find(cache_id=entry.cache_id, batch_index=index)


def test_each_tensor_is_a_region_of_its_size(here: Fixture) -> None:
    entry = here.add(tensors=3)
    view = RegionView(here.regions.rows)
    starts = np.full(3, 63, dtype=np.int64)
    assert view.bases(entry.regions, starts, (0, 1)).tolist() == [(n << 20) + 63 for n in (1, 2, 3)]
    with pytest.raises(RegionError):
        view.bases(entry.regions, starts, (1, 2))


def test_a_full_region_table_leaves_nothing_behind(here: Fixture) -> None:
    spare = 2
    for _ in range(CAPACITY - 2 - spare):
        here.regions.add(0x1000, 16)
    with pytest.raises(RegionError, match="region slots"):
        here.add(RequestKey(5), tensors=spare + 1)
    assert here.catalogue.registered_addrs() == 0
    with pytest.raises(KeyError):
        here.find(req_id=5)
    assert here.add(RequestKey(5), tensors=spare).cache_id == 2


def test_registered_addrs_counts_tensors_of_live_registered_caches(here: Fixture) -> None:
    assert here.catalogue.registered_addrs() == 0
    entry = here.add(tensors=3)
    here.add(tensors=2)
    here.add(tensors=7, owned=True)
    assert here.catalogue.registered_addrs() == 5
    here.take_back(entry)
    assert here.catalogue.registered_addrs() == 2


# 1.4: keys


def test_key_i_names_batch_entry_i(here: Fixture) -> None:
    entry = here.add(RequestKey(10), None, PrefixKey(30), RequestKey(40, 7))
    assert here.find(req_id=10) == (entry.cache_id, 0)
    assert here.find(prefix_id=30) == (entry.cache_id, 2)
    assert here.find(req_id=40, model_id=7) == (entry.cache_id, 3)


def test_request_and_prefix_keys_are_different_names_and_models_too(here: Fixture) -> None:
    first, second, third = here.add(RequestKey(5)), here.add(PrefixKey(5)), here.add(RequestKey(5, 1))
    assert here.find(req_id=5) == (first.cache_id, 0)
    assert here.find(prefix_id=5) == (second.cache_id, 0)
    assert here.find(req_id=5, model_id=1) == (third.cache_id, 0)


@pytest.mark.parametrize(
    "names", [{}, {"req_id": 6}, {"prefix_id": 5}, {"req_id": 5, "model_id": 1}, {"blocks": True}, {"cache_id": 2}]
)
def test_names_that_nobody_has(here: Fixture, names: dict[str, int]) -> None:
    here.add(RequestKey(5))
    with pytest.raises(KeyError):
        here.find(**names)


def test_of_two_registered_contiguous_caches_the_older_keeps_a_key(here: Fixture) -> None:
    older, newer = here.add(RequestKey(5)), here.add(RequestKey(4), RequestKey(5))
    assert here.find(req_id=5) == (older.cache_id, 0)
    here.take_back(newer)
    assert here.find(req_id=5) == (older.cache_id, 0)
    with pytest.raises(KeyError):
        here.find(req_id=4)


def test_the_same_key_twice_in_one_registration_names_the_first_entry(here: Fixture) -> None:
    entry = here.add(RequestKey(5), RequestKey(5))
    assert here.find(req_id=5) == (entry.cache_id, 0)


def test_of_two_block_caches_the_newer_gets_the_model(here: Fixture) -> None:
    older = here.add(BlocksKey(3), kind=BLOCKS)
    other = here.add(BlocksKey(4), kind=BLOCKS)
    before = here.regions.epoch
    newer = here.add(BlocksKey(3), kind=BLOCKS)
    assert here.find(blocks=True, model_id=3) == (newer.cache_id, 0)
    assert here.find(blocks=True, model_id=4) == (other.cache_id, 0)
    assert here.regions.epoch > before  # peers may have cached the older one
    here.take_back(older)
    assert here.find(blocks=True, model_id=3) == (newer.cache_id, 0)


def test_id_keys_bind_nothing(here: Fixture) -> None:
    entry = here.add(IdKey(5))
    assert entry.keys == {}


@pytest.mark.parametrize(
    ("bound", "kind", "wanted"),
    [
        (RequestKey(5), CONTIGUOUS, (RequestKey(5),)),
        (PrefixKey(5), CONTIGUOUS, (RequestKey(1), None, PrefixKey(5))),
        (BlocksKey(5), BLOCKS, (BlocksKey(5),)),
        (None, CONTIGUOUS, (RequestKey(5), RequestKey(5))),
        (None, CONTIGUOUS, (PrefixKey(5), None, PrefixKey(5))),
        (None, BLOCKS, (BlocksKey(5), BlocksKey(5))),
    ],
)
def test_allocated_caches_refuse_a_key_that_is_taken(
    here: Fixture, bound: Key | None, kind: CacheKind, wanted: Sequence[Key | None]
) -> None:
    first = here.add(bound, kind=kind)
    with pytest.raises(DuplicateKeyError, match="bound to another cache already" if bound else "given twice"):
        here.add(*wanted, kind=kind, owned=True)
    assert len(here.catalogue.snapshot().caches) == 1
    with pytest.raises(KeyError):
        here.find(req_id=1)
    here.take_back(first)
    if bound is not None:
        assert here.add(*wanted, kind=kind, owned=True).cache_id == 3


def test_allocated_caches_take_any_number_of_placeholders(here: Fixture) -> None:
    entry = here.add(None, None, RequestKey(5), None, owned=True)
    assert here.find(req_id=5) == (entry.cache_id, 2)


@pytest.mark.parametrize("cache_id", [-1, -(2**63)])
def test_a_negative_id_is_a_look_up_of_the_blocks_key(here: Fixture, cache_id: int) -> None:
    with pytest.raises(KeyError):
        here.find(cache_id=cache_id)
    entry = here.add(BlocksKey(), kind=BLOCKS)
    assert here.find(cache_id=cache_id) == (entry.cache_id, 0)


def test_id_0_is_nobody(here: Fixture) -> None:
    here.add(BlocksKey(), kind=BLOCKS)
    with pytest.raises(KeyError):
        here.find(cache_id=0)


# 1.5: lifetimes


def test_an_allocated_cache_lives_until_its_id_and_its_last_key_are_gone(here: Fixture) -> None:
    entry = here.add(RequestKey(1), PrefixKey(2), owned=True)
    assert here.catalogue.remove_key(RequestKey(1)) is None
    assert here.catalogue.deallocate(entry.cache_id) is None
    assert here.catalogue.deallocate(entry.cache_id) is None
    assert here.catalogue.get(entry.cache_id) is entry
    assert here.find(prefix_id=2) == (entry.cache_id, 1)
    assert here.find(cache_id=entry.cache_id, batch_index=0) == (entry.cache_id, 0)
    assert here.catalogue.remove_key(PrefixKey(2)) is entry


def test_an_allocated_cache_without_keys_ends_with_its_id(here: Fixture) -> None:
    entry = here.add(None, owned=True)
    assert here.catalogue.deallocate(entry.cache_id) is entry
    with_key = here.add(RequestKey(1), owned=True)
    assert here.catalogue.remove_key(RequestKey(1)) is None
    assert here.find(cache_id=with_key.cache_id) == (with_key.cache_id, 0)
    assert here.catalogue.deallocate(with_key.cache_id) is with_key


def test_an_allocated_blocks_cache_ends_at_once(here: Fixture) -> None:
    entry = here.add(BlocksKey(1), kind=BLOCKS, owned=True)
    assert here.catalogue.deallocate(entry.cache_id) is entry
    here.take_back(entry)
    with pytest.raises(KeyError):
        here.find(blocks=True, model_id=1)


def test_registered_caches_are_not_deallocated_and_keep_their_keys(here: Fixture) -> None:
    entry = here.add(RequestKey(1))
    before = here.regions.epoch
    assert here.catalogue.remove_key(RequestKey(1)) is None
    assert here.catalogue.deallocate(entry.cache_id) is None
    assert here.find(req_id=1) == (entry.cache_id, 0)
    assert here.regions.epoch == before


def test_unknown_ids_and_keys_are_fine(here: Fixture) -> None:
    for cache_id in (-1, 0, 77):
        assert here.catalogue.deallocate(cache_id) is None
        assert here.catalogue.get(cache_id) is None
        assert here.catalogue.pin(cache_id) is None
    assert here.catalogue.remove_key(RequestKey(1)) is None


def test_a_removed_key_is_free_and_peers_hear_of_it(here: Fixture) -> None:
    here.add(RequestKey(1), owned=True)
    before = here.regions.epoch
    here.catalogue.remove_key(RequestKey(1))
    assert here.regions.epoch > before
    with pytest.raises(KeyError):
        here.find(req_id=1)
    here.add(None, RequestKey(1), owned=True)
    assert here.find(req_id=1) == (2, 1)


def test_unregister_takes_every_name_at_once_but_get_still_knows_it(here: Fixture) -> None:
    for entry, names in (
        (here.add(RequestKey(1), PrefixKey(2)), [{"req_id": 1}, {"prefix_id": 2}, {"cache_id": 1}]),
        (here.add(BlocksKey(3), kind=BLOCKS), [{"blocks": True, "model_id": 3}, {"cache_id": 2}]),
    ):
        assert here.catalogue.wait_unpinned_after_hiding(entry, Deadline.after(0))
        for each in names:
            with pytest.raises(KeyError):
                here.find(**each)
        assert here.catalogue.pin(entry.cache_id) is None
        assert here.catalogue.get(entry.cache_id) is entry
        assert all(cache.cache_id != entry.cache_id for cache in here.catalogue.snapshot().caches)
        here.catalogue.forget(entry)
        here.catalogue.forget(entry)
        assert here.catalogue.get(entry.cache_id) is None


# Holds of transfers


def test_unregister_waits_for_the_last_transfer(here: Fixture) -> None:
    entry = here.add(RequestKey(1))
    assert here.catalogue.pin(entry.cache_id) is entry
    found, _, _ = here.catalogue.find(KeyRef(req_id=1))
    assert found is entry
    assert not here.catalogue.wait_unpinned_after_hiding(entry, Deadline.after(0.01))
    here.catalogue.unpin(entry)
    assert not here.catalogue.wait_unpinned_after_hiding(entry, Deadline.after(0))
    results: list[bool] = []
    waiter = threading.Thread(
        target=lambda: results.append(here.catalogue.wait_unpinned_after_hiding(entry, Deadline.after(10 * WAIT_S)))
    )
    waiter.start()
    here.catalogue.unpin(entry)
    waiter.join(WAIT_S)
    assert results == [True]


def test_a_look_up_that_fails_holds_nothing(here: Fixture) -> None:
    entry = here.add(RequestKey(1))
    for names in ({"req_id": 2}, {"cache_id": entry.cache_id, "batch_index": 4}):
        with pytest.raises(KeyError):
            here.catalogue.find(KeyRef(**names))  # type: ignore[arg-type]
    assert entry.pins == 0


# 1.6: which pulls release a key


def test_a_pull_of_an_allocated_cache_releases_its_request_key(here: Fixture) -> None:
    entry = here.add(RequestKey(1), PrefixKey(2), None, RequestKey(4, 9), owned=True)
    assert here.released(req_id=1) == RequestKey(1)
    assert here.released(req_id=4, model_id=9) == RequestKey(4, 9)
    assert here.released(cache_id=entry.cache_id, batch_index=0) == RequestKey(1)
    assert here.released(cache_id=entry.cache_id, batch_index=3) == RequestKey(4, 9)


def test_other_pulls_release_nothing(here: Fixture) -> None:
    owned = here.add(RequestKey(1), PrefixKey(2), None, owned=True)
    registered = here.add(RequestKey(5), PrefixKey(6))
    here.add(BlocksKey(7), kind=BLOCKS, owned=True)
    for names in (
        {"prefix_id": 2},
        {"cache_id": owned.cache_id, "batch_index": 1},
        {"cache_id": owned.cache_id, "batch_index": 2},
        {"req_id": 5},
        {"prefix_id": 6},
        {"cache_id": registered.cache_id},
        {"blocks": True, "model_id": 7},
    ):
        assert here.released(**names) is None, names


def test_consume_frees_the_key_and_then_the_cache(here: Fixture) -> None:
    entry = here.add(RequestKey(1), owned=True)
    before = here.regions.epoch
    assert here.catalogue.consume(entry, RequestKey(1), range(2)) is None  # the id still holds it
    assert here.regions.epoch > before
    with pytest.raises(KeyError):
        here.find(req_id=1)
    assert here.catalogue.consume(entry, RequestKey(1), range(2)) is None
    assert here.catalogue.deallocate(entry.cache_id) is entry

    entry = here.add(RequestKey(1), owned=True)
    assert here.catalogue.deallocate(entry.cache_id) is None
    assert here.catalogue.consume(entry, RequestKey(1), range(2)) is entry


def test_layers_are_counted_for_each_key_and_each_once(here: Fixture) -> None:
    entry = here.add(RequestKey(1), RequestKey(2), owned=True, tensors=6)
    here.catalogue.deallocate(entry.cache_id)
    consume = here.catalogue.consume
    assert consume(entry, RequestKey(1), range(4)) is None
    assert consume(entry, RequestKey(2), range(4, 6)) is None
    assert consume(entry, RequestKey(1), range(2)) is None
    assert here.find(req_id=1) == (entry.cache_id, 0)
    assert consume(entry, RequestKey(1), range(4, 6)) is None
    with pytest.raises(KeyError):
        here.find(req_id=1)
    assert here.find(req_id=2) == (entry.cache_id, 1)
    assert consume(entry, RequestKey(2), range(4)) is entry


def test_layers_of_an_earlier_life_of_a_key_do_not_count(here: Fixture) -> None:
    entry = here.add(RequestKey(1), owned=True)
    here.catalogue.consume(entry, RequestKey(1), range(1))
    here.catalogue.remove_key(RequestKey(1))
    here.take_back(entry)
    again = here.add(RequestKey(1), owned=True)
    assert here.catalogue.consume(again, RequestKey(1), range(1, 2)) is None
    assert here.find(req_id=1) == (again.cache_id, 0)
    # The old cache's transfers, ending late, leave the new one's key alone.
    assert here.catalogue.consume(entry, RequestKey(1), range(2)) is None
    assert here.find(req_id=1) == (again.cache_id, 0)


# The snapshot for peers


def test_the_snapshot_says_everything_a_peer_may_know(here: Fixture) -> None:
    first = here.add(RequestKey(1), PrefixKey(2), RequestKey(3, 9))
    second = here.add(BlocksKey(4), kind=BLOCKS, accessible=False, tensors=3)
    snapshot = here.catalogue.snapshot()
    assert snapshot.epoch == here.regions.epoch
    assert snapshot.caches == [info_of(first), info_of(second)]
    assert sorted(snapshot.keys, key=lambda key: key.model_id) == [
        KeyInfo(cache_id=1, model_id=0, req_id=1, batch_index=0),
        KeyInfo(cache_id=2, model_id=4),
        KeyInfo(cache_id=1, model_id=9, req_id=3, batch_index=2),
    ]
    info = info_of(second)
    assert (info.kind, info.tensor_size, info.entries, info.dtype) == ("blocks", 64, 4, "half")
    assert (info.accessible, info.regions) == (False, second.regions.tolist())


def test_the_snapshot_follows_every_change(here: Fixture) -> None:
    def seen() -> tuple[list[int], list[int | None]]:
        snapshot = here.catalogue.snapshot()
        assert snapshot.epoch == here.regions.epoch
        return [cache.cache_id for cache in snapshot.caches], [key.req_id for key in snapshot.keys]

    assert seen() == ([], [])
    here.add(RequestKey(5))
    assert seen() == ([1], [5])
    owned = here.add(RequestKey(6), owned=True)
    assert seen() == ([1, 2], [5, 6])
    here.catalogue.remove_key(RequestKey(6))
    assert seen() == ([1, 2], [5])
    here.regions.invalidate()
    assert seen() == ([1, 2], [5])
    here.take_back(owned)
    assert seen() == ([1], [5])
    assert here.catalogue.snapshot() is here.catalogue.snapshot()


def test_threads_register_and_unregister_at_the_same_time(here: Fixture) -> None:
    ids: list[list[int]] = [[] for _ in range(4)]

    def churn(thread: int) -> None:
        for number in range(100):
            entry = here.add(RequestKey(1000 * thread + number), owned=True)
            ids[thread].append(entry.cache_id)
            assert here.find(req_id=1000 * thread + number) == (entry.cache_id, 0)
            here.catalogue.snapshot()
            here.take_back(entry)

    threads = [threading.Thread(target=churn, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert sorted(each for seen in ids for each in seen) == list(range(1, 401))
    assert here.catalogue.snapshot().caches == []


class Hasty(dict):  # type: ignore[type-arg]
    """Keys of which one is removed by another thread at the moment in which they are looked through."""

    def items(self):  # type: ignore[no-untyped-def]
        first, *_ = super().items()
        yield first
        removing = threading.Thread(target=self.remove)
        removing.start()
        removing.join(0.3)  # as long as it has to wait for us it does not end
        yield from list(super().items())[1:]


def test_a_key_that_goes_while_another_is_looked_for(here: Fixture) -> None:
    """Whoever removes it waits until the look-up has ended."""
    one, two = RequestKey(1, 0), RequestKey(2, 0)
    entry = here.add(one, two, owned=True)
    removed = threading.Event()
    entry.keys = Hasty(entry.keys)
    entry.keys.remove = lambda: (here.catalogue.remove_key(two), removed.set())  # type: ignore[attr-defined]
    assert here.released(req_id=2, model_id=0) == two
    assert removed.wait(WAIT_S)
    assert list(entry.keys) == [one]
