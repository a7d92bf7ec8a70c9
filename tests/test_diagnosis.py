"""With each of these broken, the first screen names the cause and the remedy; the page shows what was printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from diagnosis_kit import PAGE, SITUATIONS, WELL, Situation, missing, recorded, screen

if TYPE_CHECKING:
    from peers import Peers


def named(situation: Situation) -> str:
    return situation.name.replace(" ", "-")


@pytest.mark.parametrize("situation", SITUATIONS, ids=named)
def test_the_first_screen_names_cause_and_remedy(peers: Peers, situation: Situation) -> None:
    reason = missing(situation)
    if reason:
        pytest.skip(reason)
    shown = " ".join(screen(situation.show(peers)).split())
    assert situation.cause in shown
    assert situation.remedy in shown


@pytest.mark.parametrize("situation", [*WELL, *SITUATIONS], ids=named)
def test_the_page_shows_it(situation: Situation) -> None:
    shown = " ".join(recorded(PAGE.read_text(encoding="utf-8"), situation.name).split())
    assert situation.cause in shown
    assert situation.remedy in shown
