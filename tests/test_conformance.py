"""Every path passes every check of the conformance kit, with an owner in a second process where it needs one."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import pytest

from llm_datadist.paths import registry
from llm_datadist.testing import CHECKS, PathEnds, check_path, ends_of

if TYPE_CHECKING:
    from collections.abc import Iterator

LAST = list(CHECKS)[-1]
"""Ends the owner."""
NAMES = [name for name in registry.BUILT_IN if name != "nixl"]
"""That one has a module of its own: it needs a package that is not everywhere."""


def make(name: str) -> contextlib.AbstractContextManager[PathEnds]:
    """Both ends of one of our paths."""
    return ends_of(registry.get(name), same_process=name == "inprocess")


@pytest.fixture(scope="module", params=NAMES)
def ends(request: pytest.FixtureRequest) -> Iterator[PathEnds]:
    """The same ends for all checks of a path but the one that ends them."""
    with make(request.param) as made:
        yield made


@pytest.mark.parametrize("check", [name for name in CHECKS if name != LAST])
def test_path_passes(ends: PathEnds, check: str) -> None:
    check_path(lambda: contextlib.nullcontext(ends), [check])


@pytest.mark.parametrize("name", NAMES)
def test_path_passes_when_its_owner_ends(name: str) -> None:
    check_path(functools.partial(make, name), [LAST])


def test_checks_that_do_not_exist() -> None:
    with pytest.raises(KeyError, match="no such"):
        check_path(functools.partial(make, "inprocess"), ["no such"])
