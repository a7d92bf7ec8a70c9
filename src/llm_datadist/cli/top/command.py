"""Look again and again, until it is interrupted."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from rich.live import Live

from llm_datadist.cli.show import open_console, print_problem
from llm_datadist.cli.top.rates import rows
from llm_datadist.cli.top.scrape import EndpointError, Snapshot, scrape, url_of
from llm_datadist.cli.top.show import view

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from llm_datadist.cli.top.rates import Rows

_TIMEOUT_S: Final = 5.0
_MOST_AT_ONCE: Final = 16


class Watch:
    """Several endpoints, and what each told last."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._last: dict[str, Snapshot] = {}
        self._pool = ThreadPoolExecutor(min(len(urls), _MOST_AT_ONCE))

    def look(self) -> list[tuple[str, Rows | str]]:
        """What each endpoint did since the last look, or why it tells nothing."""
        return list(zip(self._urls, self._pool.map(self._one, self._urls), strict=True))

    def _one(self, url: str) -> Rows | str:
        try:
            now = scrape(url, _TIMEOUT_S)
        except EndpointError as error:
            return str(error)
        before = self._last.get(url, now)
        self._last[url] = now
        return rows(before, now)

    def close(self) -> None:
        """Ask no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def run(targets: Sequence[str], interval_s: float, *, once: bool) -> int:
    """Show the endpoints.

    Returns:
        The exit code: 0 all told something, 1 at least one did not.
    """
    watch = Watch([url_of(target) for target in targets])
    try:
        problems = [told for _, told in watch.look() if isinstance(told, str)]
        if len(problems) == len(targets):
            for problem in problems:
                print_problem("top", problem)
            return 1
        if once:
            return _once(watch, interval_s)
        _live(watch, interval_s)
    finally:
        watch.close()
    return 0


def _once(watch: Watch, interval_s: float) -> int:
    shown, good = look_after(watch, interval_s)
    open_console().print(shown)
    return 0 if good else 1


def _live(watch: Watch, interval_s: float) -> None:
    console = open_console()
    if not console.is_interactive:  # a log: one view after the other
        while True:
            console.print(look_after(watch, interval_s)[0])
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(look_after(watch, interval_s)[0], refresh=True)


def look_after(watch: Watch, interval_s: float) -> tuple[RenderableType, bool]:
    """What to show after an interval, and whether all endpoints told something."""
    begun = time.monotonic()
    time.sleep(interval_s)
    seen = watch.look()
    return view(seen, time.monotonic() - begun), not any(isinstance(told, str) for _, told in seen)
