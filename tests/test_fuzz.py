"""Every decoder against mutated inputs: only what is documented, in bounded memory, and a running engine unharmed."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from fuzz import mutants, storm
from fuzz.mutate import Mutator
from fuzz.run import CORPUS
from fuzz.targets import TARGETS, Target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from pathlib import Path

SEED = 20
COUNT = 2000
KEPT_PER_BYTE = 512
"""A map of a few bytes becomes an object of a few hundred; what grows faster than that is not bounded by the input."""
KEPT_ANYWAY = 1 << 20


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_datadist.utils.log.error", lambda *_args, **_more: None)


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_is_replayed(name: str) -> None:
    inputs = sorted((CORPUS / name).iterdir())
    assert inputs
    for path in inputs:
        TARGETS[name].run(path.read_bytes())


def test_every_folder_of_the_corpus_is_of_a_target_and_all_is_small() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 200 << 10


@pytest.mark.parametrize("name", TARGETS)
def test_mutants_meet_only_documented_exceptions(name: str) -> None:
    outcome = mutants.run(name, SEED, COUNT)
    assert outcome.finding is None, outcome.finding
    assert outcome.inputs == COUNT


@pytest.mark.parametrize("name", TARGETS)
def test_memory_is_bounded_by_the_input(name: str) -> None:
    target = TARGETS[name]
    inputs = [*target.examples(), *itertools.islice(Mutator([*target.examples()], target.form, SEED), 200)]
    target.run(inputs[0])  # what is made once, is made now
    for raw in inputs:
        tracemalloc.start()
        try:
            target.run(raw)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak <= KEPT_ANYWAY + KEPT_PER_BYTE * len(raw), raw


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from(sorted(TARGETS)), raw=st.binary(max_size=600))
def test_any_bytes(name: str, raw: bytes) -> None:
    TARGETS[name].run(raw)


def test_a_seed_gives_the_same_mutants_again() -> None:
    first, again, other = (
        [*itertools.islice(Mutator([b"abcdefgh", b"12345678"], "bytes", seed), 50)] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_what_is_not_documented_is_told_with_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_on_long(raw: bytes) -> None:
        if len(raw) > 8:
            message = "too long"
            raise KeyError(message)

    monkeypatch.setitem(TARGETS, "broken", Target(fails_on_long, lambda: iter([b"12345678"]), "bytes"))
    outcome = mutants.run("broken", 1, 1000)
    assert outcome.finding is not None
    assert outcome.finding.startswith(f"seed 1, input {outcome.inputs - 1}: b'")
    assert "KeyError: 'too long'" in outcome.finding


def test_an_engine_survives_a_storm_of_mutated_frames(tmp_path: Path) -> None:
    report = storm.run(SEED, 3000, tmp_path)
    assert not report.findings, report
    assert set(report.connections) == {"control", "data", "hand-over", "stranger"}
