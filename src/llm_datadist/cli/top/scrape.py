"""Fetch what an endpoint exposes, and keep of it what is ours."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from llm_datadist.observe.metrics import PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping

    Labels: TypeAlias = tuple[str, ...]
    Values: TypeAlias = dict[Labels, float]

_MOST_BYTES: Final = 64 << 20
SET_UP: Final = (
    "in the process to be watched: LLMConfig.metrics = True; from prometheus_client import REGISTRY,"
    " start_http_server; from llm_datadist.observe.prometheus import Collector; REGISTRY.register(Collector(datadist));"
    " start_http_server(9400, addr='127.0.0.1')"
)
_LABELS: Final[Mapping[str, tuple[str, ...]]] = {
    "links": ("cluster", "state"),
    "link_paths": ("cluster", "path"),
    "transfers_in_progress": ("cluster",),
    "cache_holds": ("cluster",),
    "caches": ("cluster",),
    "data_connections": ("cluster",),
    "transfers_total": ("cluster", "operation", "path", "status"),
    "transferred_bytes_total": ("cluster", "operation", "path"),
    "transfer_duration_seconds_bucket": ("cluster", "operation", "path", "le"),
    "transfer_phase_duration_seconds_sum": ("cluster", "operation", "phase"),
    "served_requests_total": ("cluster", "operation", "status"),
    "served_bytes_total": ("cluster", "operation"),
}
"""What is looked at, by the name of the sample without ours in front."""


class EndpointError(Exception):
    """An endpoint tells nothing; the text says why, and what helps."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one endpoint told at a moment."""

    at: float
    """Seconds of the monotonic clock."""
    values: Mapping[str, Values] = field(default_factory=dict)
    """By name of the sample, then by its labels as in ``_LABELS``."""

    def of(self, name: str) -> Values:
        """The samples of a name."""
        return self.values.get(name, {})

    @property
    def clusters(self) -> list[str]:
        """All engines of the process, in the order of their ids."""
        return sorted((labels[0] for labels in self.of("transfers_in_progress")), key=lambda text: (len(text), text))


def url_of(target: str) -> str:
    """The URL of an endpoint that may be given as ``HOST:PORT``.

    Raises:
        ValueError: it is neither.
    """
    url = target if "://" in target else f"http://{target}/metrics"
    parts = urllib.parse.urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in {"http", "https"} or not parts.hostname or ("://" not in target and not port):
        message = f"{target!r} is no endpoint: give HOST:PORT, like 127.0.0.1:9400, or an http:// URL"
        raise ValueError(message)
    return url


def scrape(url: str, timeout_s: float) -> Snapshot:
    """Read the endpoint once.

    Raises:
        EndpointError: it cannot be reached, or tells nothing of ours.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as response:
            body = response.read(_MOST_BYTES).decode()
    except urllib.error.HTTPError as error:
        message = f"{url} answers {error.code} {error.reason}: see whether it is a Prometheus endpoint; {SET_UP}"
        raise EndpointError(message) from error
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
        reason = getattr(error, "reason", None) or error
        message = f"{url} cannot be read: {reason}. See whether the process runs and exposes its metrics; {SET_UP}"
        raise EndpointError(message) from error
    return parse(url, body)


def parse(url: str, body: str) -> Snapshot:
    """What an exposition says of us.

    Raises:
        EndpointError: nothing, or it is none.
    """
    at = time.monotonic()
    values: dict[str, Values] = {}
    try:
        for family in text_string_to_metric_families(body):
            for sample in family.samples:
                name = sample.name.removeprefix(PREFIX)
                if name != sample.name and name in _LABELS:
                    labels = tuple(sample.labels.get(label, "") for label in _LABELS[name])
                    values.setdefault(name, {})[labels] = sample.value
    except ValueError as error:
        message = f"{url} is no Prometheus exposition: {error}; {SET_UP}"
        raise EndpointError(message) from error
    if "transfers_in_progress" not in values:
        message = f"{url} has no {PREFIX}* metrics: no LLMDataDist is registered there; {SET_UP}"
        raise EndpointError(message)
    return Snapshot(at, values)
