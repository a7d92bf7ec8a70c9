"""Which cases a run of the benchmark has."""

from __future__ import annotations

import shlex

import pytest
from typer.testing import CliRunner

from llm_datadist.cli import app as cli
from llm_datadist.cli.bench import cases
from llm_datadist.cli.bench.command import check_memory, steps
from llm_datadist.cli.bench.driver import BenchError
from llm_datadist.cli.bench.results import Contestant, Order
from llm_datadist.cli.bench.units import parse_bytes
from llm_datadist.cli.bench.workload import BESIDE, FULL, QUICK, Kind, Operation, Workload, parse_block_sizes
from llm_datadist.cli.models import ModelName

MIB = 1 << 20


def workload(**changed: object) -> Workload:
    fields = {
        "effort": FULL,
        "paths": ("process_vm", "tcp"),
        "operations": (Operation.PULL_BLOCKS,),
        "block_sizes": (4096, MIB),
        "orders": (Order.SHUFFLED,),
        "total_bytes": 64 * MIB,
        "rounds": 5,
        "models": (),
        "kinds": tuple(Kind),
    }
    return Workload(**{**fields, **changed})


def test_every_case_can_be_measured_and_moves_what_was_asked_for():
    everything = workload(operations=tuple(Operation), orders=tuple(Order))
    found = everything.throughput_cases("tcp") + everything.latency_cases("tcp")
    for case in found:
        cases.check(case)
        assert case.path == "tcp"
    assert {case.operation for case in found} == {operation.value for operation in Operation}
    assert {case.total_bytes for case in everything.throughput_cases("tcp")} == {64 * MIB}
    assert len(everything.throughput_cases("tcp")) == 3 * 3 * 2 + 2  # whole caches know neither order nor blocks


def test_blocks_larger_than_the_total_are_moved_once():
    (case,) = workload(block_sizes=(256 * MIB,)).throughput_cases("tcp")
    assert (case.tensors, case.blocks, case.block_bytes) == (2, 1, 256 * MIB)


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (ModelName.LLAMA_3_1_8B, {("llama-3.1-8b", 64, 32 << 10)}),
        (ModelName.QWEN3_8B, {("qwen3-8b", 72, 32 << 10)}),
        (ModelName.DEEPSEEK_R1, {("deepseek-r1 latent", 61, 128 << 10), ("deepseek-r1 rope", 61, 16 << 10)}),
    ],
)
def test_models_are_moved_in_their_shapes(model, shapes):
    found = workload(models=(model,), total_bytes=256 * MIB).throughput_cases("process_vm")
    assert {(case.model, case.tensors, case.block_bytes) for case in found} == shapes
    assert len({case.blocks for case in found}) == 1  # all caches of a model have as many blocks
    moved = sum(case.total_bytes for case in found)
    assert 0.9 * 256 * MIB < moved <= 256 * MIB


def test_latent_caches_go_layer_by_layer_as_halves():
    asked = workload(models=(ModelName.DEEPSEEK_R1,), operations=(Operation.LAYER_WISE, Operation.PULL_BLOCKS))
    latent = [case for case in asked.throughput_cases("tcp") if case.model == "deepseek-r1 latent"]
    halves, whole = latent
    assert (halves.tensors, halves.blocks) == (2 * whole.tensors, whole.blocks // 2)


def test_the_limit_of_a_path_stands_beside_the_library():
    assert BESIDE["process_vm"][:2] == (Contestant.OURS, Contestant.LIMIT_PROCESS_VM)
    assert BESIDE["tcp"][:2] == (Contestant.OURS, Contestant.LIMIT_SOCKETS)


def test_steps_are_those_of_the_driver():
    contestants = len(BESIDE["process_vm"]) + len(BESIDE["tcp"])
    throughput, latency, scale = contestants * 2, 2 * 2, len(FULL.links) + len(FULL.tensors)
    assert steps(workload()) == 6 * (throughput + latency + scale)
    assert steps(workload(kinds=(Kind.LATENCY,))) == 6 * latency


def test_what_does_not_fit_is_refused_before_anything_starts(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9 kB\nMemAvailable:  900000 kB\n", encoding="ascii")
    check_memory(workload(total_bytes=16 * MIB), meminfo)
    check_memory(workload(total_bytes=64 * MIB, kinds=(Kind.LATENCY,)), meminfo)
    with pytest.raises(BenchError, match=r"need 0\.9 GiB .* only 0\.9 GiB are available: use a smaller --total"):
        check_memory(workload(total_bytes=64 * MIB), meminfo)


@pytest.mark.parametrize(
    ("text", "count"), [("4096", 4096), ("4k", 4096), (" 4 KiB ", 4096), ("1MiB", MIB), ("2g", 2 << 30), ("8b", 8)]
)
def test_sizes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "4 KB", "-1", "1.5MiB", "KiB", "4KiB 8KiB", "9" * 16])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="is no size: use a whole number"):
        parse_bytes(text)


def test_block_sizes_that_cannot_be_measured():
    assert parse_block_sizes("4KiB,1MiB") == (4096, MIB)
    with pytest.raises(ValueError, match="block_bytes is 12: use a positive multiple of 8"):
        parse_block_sizes("4KiB,12")
    with pytest.raises(ValueError, match="'' is no size"):
        parse_block_sizes("4KiB,")


@pytest.mark.parametrize(
    "asked",
    [
        workload(),
        workload(effort=QUICK, orders=tuple(Order), operations=tuple(Operation), kinds=(Kind.SCALE,), paths=("tcp",)),
        workload(models=(ModelName.TINY, ModelName.QWEN3_8B), block_sizes=parse_block_sizes(FULL.block_sizes)),
    ],
)
def test_the_command_of_a_run_asks_for_the_same_run(asked, monkeypatch):
    found = []
    monkeypatch.setattr(cli.bench_command, "run", lambda given, _outputs: found.append(given) or 0)
    program, *arguments = shlex.split(asked.command)
    assert program == "llm-datadist"
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    assert found == [asked]
