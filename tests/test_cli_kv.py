"""The demo's sizes, block tables, contents and proof of arrival."""

from __future__ import annotations

import numpy as np
import pytest

from llm_datadist.cli import kv
from llm_datadist.cli.models import MODELS, CacheShape, ModelName
from llm_datadist.cli.plan import BlockTable, Operation, PathName, Plan

TINY = MODELS[ModelName.TINY].caches[0]
BLOCKS = 6
CAPACITY = 8


def ignore(bytes_done: int) -> None:
    """Take a progress report."""
    assert bytes_done > 0


def plan_of(name: ModelName, tokens: int, seed: int = 1) -> Plan:
    """A plan of which only sizes and tables matter."""
    return Plan(name, tokens, PathName.AUTO, seed)


# ---------------------------------------------------------------- geometry


@pytest.mark.parametrize(
    ("name", "caches", "bytes_per_token"),
    [
        (ModelName.LLAMA_3_1_8B, [("kv", 64, 32 << 10)], 131_072),
        (ModelName.QWEN3_8B, [("kv", 72, 32 << 10)], 147_456),
        (ModelName.DEEPSEEK_R1, [("latent", 61, 16 << 10), ("rope", 61, 2 << 10)], 70_272),
        (ModelName.TINY, [("kv", 4, 2 << 10)], 512),
    ],
)
def test_geometry(name: ModelName, caches: list[tuple[str, int, int]], bytes_per_token: int) -> None:
    model = MODELS[name]
    assert [(cache.name, cache.num_tensors, cache.block_bytes) for cache in model.caches] == caches
    assert model.block_bytes == 16 * bytes_per_token
    assert model.num_tensors == sum(tensors for _, tensors, _ in caches)
    assert [cache.model_id for cache in model.caches] == list(range(len(caches)))


def test_every_model_name_is_known() -> None:
    assert set(MODELS) == set(ModelName)


@pytest.mark.parametrize(
    ("name", "tokens", "blocks"),
    [
        (ModelName.LLAMA_3_1_8B, 4096, 256),
        (ModelName.TINY, 1, 1),
        (ModelName.TINY, 16, 1),
        (ModelName.TINY, 17, 2),
        (ModelName.DEEPSEEK_R1, 1, 2),
        (ModelName.DEEPSEEK_R1, 33, 4),
    ],
)
def test_tokens_are_rounded_up_to_blocks(name: ModelName, tokens: int, blocks: int) -> None:
    plan = plan_of(name, tokens)
    assert plan.blocks == blocks
    assert plan.capacity > blocks
    assert plan.capacity % plan.model.block_multiple == 0


def test_default_moves_half_a_gibibyte() -> None:
    plan = plan_of(ModelName.LLAMA_3_1_8B, 4096)
    assert plan.source_bytes == 512 << 20
    assert plan.timeout_ms == 30_000


# ---------------------------------------------------------------- block tables


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("name", [ModelName.TINY, ModelName.DEEPSEEK_R1])
@pytest.mark.parametrize("tokens", [1, 500])
def test_tables_move_every_block_once(operation: Operation, name: ModelName, tokens: int) -> None:
    plan = plan_of(name, tokens)
    for cache in plan.model.caches:
        table = plan.tensor_table(operation, cache)
        assert sorted(table.src.tolist()) == list(range(plan.blocks))
        assert len(set(table.dst.tolist())) == plan.blocks
        assert set(table.dst.tolist()) <= set(range(plan.capacity))


def test_halves_stay_in_their_half() -> None:
    plan = plan_of(ModelName.DEEPSEEK_R1, 500)
    table = plan.tensor_table(Operation.LAYER_WISE, plan.model.caches[0])
    in_second = table.src >= plan.blocks // 2
    assert in_second.sum() == plan.blocks // 2
    assert ((table.dst >= plan.capacity // 2) == in_second).all()


def test_tables_are_shuffled_and_follow_from_the_seed() -> None:
    one, same, other = (plan_of(ModelName.TINY, 500, seed) for seed in (1, 1, 2))
    tables = [plan.call_table(Operation.PULL_BLOCKS, TINY) for plan in (one, same, other)]
    assert tables[0].src.tolist() == tables[1].src.tolist()
    assert tables[0].dst.tolist() == tables[1].dst.tolist()
    assert tables[0].src.tolist() != tables[2].src.tolist()
    assert tables[0].src.tolist() != sorted(tables[0].src.tolist())
    assert tables[0].dst.tolist() != sorted(tables[0].dst.tolist())


# ---------------------------------------------------------------- contents


def filled(seed: int = 1, shape: CacheShape = TINY, blocks: int = BLOCKS) -> list[kv.U8]:
    """Tensors with their seeded contents."""
    tensors = list(np.zeros((shape.num_tensors, blocks, shape.block_bytes), dtype=np.uint8))
    kv.fill(tensors, seed, shape, ignore)
    return tensors


def test_each_block_can_be_made_alone() -> None:
    whole = kv.content(7, TINY, 2, 0, BLOCKS)
    for block in range(BLOCKS):
        assert (kv.content(7, TINY, 2, block, 1) == whole[block]).all()


def test_no_two_blocks_are_equal() -> None:
    latent, rope = MODELS[ModelName.DEEPSEEK_R1].caches
    seen = {
        kv.content(seed, cache, tensor, block, 1).tobytes()[:2048]
        for seed in (0, 1, 2**64 - 1)
        for cache in (latent, rope)
        for tensor in range(3)
        for block in range(3)
    }
    assert len(seen) == 3 * 2 * 3 * 3


def test_large_tensors_are_filled_in_pieces() -> None:
    blocks = 3 * (4 << 20) // TINY.block_bytes // 2
    shape = CacheShape("kv", 0, 1, 1, TINY.token_shape)
    (tensor,) = filled(shape=shape, blocks=blocks)
    assert (tensor == kv.content(1, shape, 0, 0, blocks)).all()
    assert (kv.expected_checksums(1, shape, blocks, ignore) == kv.checksums([tensor], ignore)).all()


def test_tensors_at_an_address_are_that_memory() -> None:
    memory = np.zeros((2, BLOCKS, TINY.block_bytes), dtype=np.uint8)
    views = kv.tensors_at([int(tensor.ctypes.data) for tensor in memory], TINY, BLOCKS)
    kv.poison(views)
    assert (memory == kv.POISON).all()


# ---------------------------------------------------------------- proof


TABLE = BlockTable(np.array([2, 0, 1, 5, 4, 3]), np.array([7, 1, 0, 4, 6, 2]))
"""Blocks 3 and 5 of the destination stay as they are."""


def received() -> list[kv.U8]:
    """Tensors as they should be after an operation."""
    tensors = list(np.empty((TINY.num_tensors, CAPACITY, TINY.block_bytes), dtype=np.uint8))
    kv.poison(tensors)
    for tensor, source in zip(tensors, filled(), strict=True):
        tensor[TABLE.dst] = source[TABLE.src]
    return tensors


def verdict(tensors: list[kv.U8]) -> kv.Verified:
    """What the receiver would say."""
    expected = kv.expected_checksums(1, TINY, BLOCKS, ignore)
    return kv.judge(TINY, TABLE, expected, kv.checksums(tensors, ignore))


def test_what_arrived_is_verified() -> None:
    assert verdict(received()) == kv.Verified(24, 24)


def test_one_wrong_byte_is_found() -> None:
    tensors = received()
    tensors[2][4, 1000] ^= 1
    found = verdict(tensors)
    assert (found.blocks_ok, found.blocks_total) == (23, 24)
    (problem,) = found.problems
    assert problem.startswith("block 4 of tensor 2 of the kv cache does not hold the bytes of block 5 of the prefill")
    assert problem.endswith("(1 wrong blocks in this cache)")


def test_block_that_never_arrived_is_found() -> None:
    tensors = received()
    tensors[1][6] = kv.POISON
    found = verdict(tensors)
    assert found.blocks_ok == 23
    assert "block 6 of tensor 1 of the kv cache was never written" in found.problems[0]


def test_nothing_arrived() -> None:
    tensors = received()
    kv.poison(tensors)
    assert verdict(tensors).blocks_ok == 0


def test_overwritten_neighbour_is_found() -> None:
    tensors = received()
    tensors[3][5, -1] = 0
    found = verdict(tensors)
    assert found.blocks_ok == found.blocks_total
    assert "block 5 of tensor 3 of the kv cache is not part of the operation" in found.problems[0]


def test_swapped_tensors_are_found() -> None:
    tensors = received()
    tensors[0], tensors[1] = tensors[1], tensors[0]
    assert verdict(tensors).blocks_ok == 12


def test_verdicts_add_up() -> None:
    assert kv.Verified(1, 2, ("a",)) + kv.Verified(3, 3) + kv.Verified(0, 1, ("b",)) == kv.Verified(4, 6, ("a", "b"))
