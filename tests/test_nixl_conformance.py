"""The path over NIXL passes every check of the conformance kit, over shared memory and over TCP."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from llm_datadist.paths.nixl import Nixl
from llm_datadist.testing import CHECKS, PathEnds, check_path, ends_of
from nixl_kit import TRANSPORTS, needs_nixl

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs_nixl
LAST = list(CHECKS)[-1]
"""Ends the owner."""


@pytest.fixture(scope="module", params=TRANSPORTS.values(), ids=TRANSPORTS.keys())
def ends(request: pytest.FixtureRequest) -> Iterator[PathEnds]:
    """The same ends for all checks but the one that ends them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", request.param)
        with ends_of(Nixl()) as made:
            yield made


@pytest.mark.parametrize("check", [name for name in CHECKS if name != LAST])
def test_nixl_passes(ends: PathEnds, check: str) -> None:
    check_path(lambda: contextlib.nullcontext(ends), [check])


@pytest.mark.parametrize("ucx", TRANSPORTS.values(), ids=TRANSPORTS.keys())
def test_nixl_passes_when_its_owner_ends(ucx: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", ucx)
    check_path(lambda: ends_of(Nixl()), [LAST])


def test_nixl_passes_within_a_process() -> None:
    check_path(lambda: ends_of(Nixl(), same_process=True), ["moves every byte", "shortcut", "many threads"])
