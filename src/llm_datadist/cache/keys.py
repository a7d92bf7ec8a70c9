"""How a cache is named, here and at a peer, and what the names mean to the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.cache.shown import Shown
from llm_datadist.engine.requests import INVALID_ID, BlocksKey, IdKey, PrefixKey, RequestKey
from llm_datadist.status import raise_if_false
from llm_datadist.utils import utils

if TYPE_CHECKING:
    from typing import TypeAlias

    AnyKey: TypeAlias = "CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey"


def is_invalid_id(number: int) -> bool:
    """Whether an id means "not set": negative, or 2**64 - 1."""
    return number < 0 or number == INVALID_ID


def is_valid_id(number: int) -> bool:
    """Whether an id is set."""
    return not is_invalid_id(number)


def _bind(kind: str, names: tuple[str, ...], args: tuple[int, ...], kwargs: dict[str, int]) -> dict[str, int]:
    """The arguments of a key by name: positions win over keywords, ``cluster_id`` over ``prompt_cluster_id``."""
    raise_if_false(
        len(args) + len(kwargs) <= len(names),
        "{} takes at most {} arguments ({}), but got {}",
        kind,
        len(names),
        ", ".join(names),
        len(args) + len(kwargs),
    )
    given = dict(kwargs)
    legacy = {"cluster_id": given.pop("prompt_cluster_id")} if "prompt_cluster_id" in given else {}
    return {**legacy, **given, **dict(zip(names, args, strict=False))}


def _check_names(kind: str, names: tuple[str, ...], required: tuple[str, ...], given: dict[str, int]) -> None:
    for name in required:
        raise_if_false(name in given, "{} is required: pass it to {}", name, kind)
    unknown = sorted(set(given) - set(names))
    raise_if_false(not unknown, "Unsupported arguments {} of {}: it knows {}", unknown, kind, ", ".join(names))


class CacheKey(Shown):
    """Names one batch entry of a contiguous cache by request or by prefix.

    ``CacheKey(cluster_id, req_id, model_id=0, prefix_id=2**64 - 1)``, by position or keyword; ``prompt_cluster_id`` is
    the older keyword for ``cluster_id``. All are unsigned 64 bits; 2**64 - 1 means "not set". ``cluster_id`` names the
    peer of a pull and is ignored when a cache is registered or allocated; there, a key without req_id and prefix_id
    holds its place in the batch without naming it.

    Raises:
        LLMException: LLM_PARAM_INVALID: cluster_id or req_id is missing, an unknown keyword, too many arguments.
        TypeError: an id is not an int.
        ValueError: an id does not fit unsigned 64 bits.
    """

    _shown = ("cluster_id", "req_id", "model_id", "prefix_id")

    def __init__(self, *args: int, **kwargs: int) -> None:
        given = _bind("CacheKey", self._shown, args, kwargs)
        _check_names("CacheKey", self._shown, ("cluster_id", "req_id"), given)
        values = {"model_id": 0, "prefix_id": INVALID_ID, **given}
        for name in self._shown:
            utils.check_uint64(name, values[name])
        self._values = values

    @property
    def cluster_id(self) -> int:
        """Cluster id of the peer that owns the cache."""
        return self._values["cluster_id"]

    prompt_cluster_id = cluster_id

    @property
    def req_id(self) -> int:
        """Request id; 2**64 - 1 if not set."""
        return self._values["req_id"]

    @property
    def model_id(self) -> int:
        """Model id; separates caches of several models."""
        return self._values["model_id"]

    @property
    def prefix_id(self) -> int:
        """Prefix id; 2**64 - 1 if not set."""
        return self._values["prefix_id"]


class BlocksCacheKey(Shown):
    """Names a blocks cache by model: each process has one per model id.

    ``BlocksCacheKey(cluster_id, model_id=0)``, by position or keyword; ``prompt_cluster_id`` is the older keyword.
    ``cluster_id`` names the peer of a transfer and is ignored when a cache is registered or allocated.

    Raises:
        LLMException: LLM_PARAM_INVALID: cluster_id is missing, an unknown keyword, too many arguments.
        TypeError: an id is neither int nor None. What is no unsigned 64-bit int is refused when the key is used.
    """

    _shown = ("cluster_id", "model_id")

    def __init__(self, *args: int, **kwargs: int) -> None:
        given = _bind("BlocksCacheKey", self._shown, args, kwargs)
        _check_names("BlocksCacheKey", self._shown, ("cluster_id",), given)
        values = {"model_id": 0, **given}
        for name in self._shown:
            utils.check_isinstance(name, values[name], int)
        self._values = values

    @property
    def cluster_id(self) -> int:
        """Cluster id of the peer that owns the cache."""
        return self._values["cluster_id"]

    prompt_cluster_id = cluster_id

    @property
    def model_id(self) -> int:
        """Model id."""
        return self._values["model_id"]


class CacheKeyByIdAndIndex(Shown):
    """Names one batch entry of a peer's cache by the number that cache has there.

    Args:
        cluster_id: the peer, unsigned 64 bits.
        cache_id: ``Cache.cache_id`` at the peer, signed 64 bits. With remote access, 0 and less mean "the cache whose
            key has req_id 0" to a push, and "the cache whose key has no req_id" to a pull.
        batch_index: batch entry, unsigned 32 bits.

    Raises:
        TypeError: not an int.
        ValueError: does not fit.
    """

    _shown = ("cluster_id", "cache_id", "batch_index")

    def __init__(self, cluster_id: int, cache_id: int, batch_index: int = 0) -> None:
        utils.check_uint64("cluster_id", cluster_id)
        utils.check_int64("cache_id", cache_id)
        utils.check_uint32("batch_index", batch_index)
        self._cluster_id = cluster_id
        self._cache_id = cache_id
        self._batch_index = batch_index

    @property
    def cluster_id(self) -> int:
        """Cluster id of the peer that owns the cache."""
        return self._cluster_id

    @property
    def cache_id(self) -> int:
        """Number of the cache at the peer."""
        return self._cache_id

    @property
    def batch_index(self) -> int:
        """Batch entry."""
        return self._batch_index


def naming_key(key: CacheKey) -> RequestKey | PrefixKey | None:
    """What a key names in this process: a prefix if it has one, else a request; None for a placeholder."""
    if is_valid_id(key.prefix_id):
        return PrefixKey(int(key.prefix_id), int(key.model_id))
    return RequestKey(int(key.req_id), int(key.model_id)) if is_valid_id(key.req_id) else None


def nameless_key(key: CacheKey) -> RequestKey:
    """The request key, also of a CacheKey that has no request id: nothing is ever entered under that."""
    return RequestKey(int(key.req_id), int(key.model_id))


def destination_key(key: BlocksCacheKey | CacheKeyByIdAndIndex) -> BlocksKey | IdKey:
    """What a key that does not go by request names at a peer.

    Raises:
        TypeError: the model id of a BlocksCacheKey is no unsigned 64-bit int.
    """
    if isinstance(key, BlocksCacheKey):
        return BlocksKey(_unsigned("model_id", key.model_id))
    return IdKey(int(key.cache_id), int(key.batch_index))


def source_key(key: AnyKey) -> RequestKey | PrefixKey | BlocksKey | IdKey:
    """What any key names at a peer.

    Raises:
        TypeError: the model id of a BlocksCacheKey is no unsigned 64-bit int.
    """
    if isinstance(key, CacheKey):
        return naming_key(key) or nameless_key(key)
    return destination_key(key)


def peer_of(key: AnyKey) -> int:
    """The cluster id of the peer a key names.

    Raises:
        TypeError: it is no unsigned 64-bit int.
    """
    return _unsigned("cluster_id", key.cluster_id)


def _unsigned(name: str, value: int) -> int:
    if not isinstance(value, int) or not 0 <= value <= utils.UINT64_MAX:
        message = f"{name} of the key must be an int in [0, {utils.UINT64_MAX}] to be used, but is {value!r}"
        raise TypeError(message)
    return int(value)
