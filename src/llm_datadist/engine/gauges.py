"""What an engine holds at a moment, as metrics: links, transfers that run, caches."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from llm_datadist.engine.link import LinkState
from llm_datadist.observe.metrics import PREFIX, Family, Kind, Sample

if TYPE_CHECKING:
    from llm_datadist.engine.core import Core


def gauges(core: Core) -> tuple[Family, ...]:
    """Read now."""
    links = core.table.all()
    states = Counter(link.state for link in links)
    paths = Counter(report.path for report in (link.report() for link in links) if report.path)
    running = sum(len(link.running) for link in links)
    caches = core.catalogue.all()
    return (
        _gauge("links", "Links, by state.", ("state",), {(each.name.lower(),): states[each] for each in LinkState}),
        _gauge("link_paths", "Links, by the path in use.", ("path",), {(name,): n for name, n in paths.items()}),
        _gauge("transfers_in_progress", "Transfers that run, those that wait included.", (), {(): running}),
        _gauge("caches", "Caches that are registered or allocated.", (), {(): len(caches)}),
        _gauge("cache_keys", "Keys of batch entries.", (), {(): core.catalogue.num_keys()}),
        _gauge("cache_holds", "Caches held for pulls of peers.", (), {(): core.service.num_holds}),
        _gauge("data_connections", "Data connections that are served.", (), {(): core.data_server.total()}),
    )


def _gauge(name: str, text: str, labels: tuple[str, ...], values: dict[tuple[str, ...], int]) -> Family:
    samples = tuple(Sample(key, float(value)) for key, value in sorted(values.items()))
    return Family(PREFIX + name, text, Kind.GAUGE, labels, samples)
