"""Layer ranges: which layers of a cache a transfer is about."""

from __future__ import annotations

from llm_datadist.status import raise_if_false
from llm_datadist.utils import utils

NUM_TENSORS_PER_LAYER = 2
"""Tensors of one layer unless the caller says otherwise: K and V."""


def check_layer_range(name: str, layer_range: range) -> None:
    """Check a layer range where one is needed: step 1, ``0 <= start < stop``.

    Raises:
        TypeError: not a range.
        LLMException: LLM_PARAM_INVALID: another step, empty, or negative.
    """
    utils.check_isinstance(name, layer_range, range, allow_none=False)
    raise_if_false(layer_range.step == 1, "{} must have step 1, but is {!r}", name, layer_range)
    raise_if_false(
        0 <= layer_range.start < layer_range.stop,
        "{} must be 0 <= start < stop, but is {!r}",
        name,
        layer_range,
    )


def optional_layer_range(name: str, layer_range: range | None) -> range | None:
    """Check a layer range where it may be left out, as in pulls; an empty range counts as left out.

    Returns:
        The range, or None for "all layers".

    Raises:
        TypeError: neither a range nor None.
        LLMException: LLM_PARAM_INVALID: another step than 1, or negative.
        ValueError: a layer beyond unsigned 32 bits.
    """
    utils.check_isinstance(name, layer_range, range)
    if layer_range is None:
        return None
    raise_if_false(layer_range.step == 1, "{} must have step 1, but is {!r}", name, layer_range)
    if not layer_range:
        return None
    raise_if_false(layer_range.start >= 0, "{} must not be negative, but is {!r}", name, layer_range)
    utils.check_uint32(f"first layer of {name}", layer_range.start)
    utils.check_uint32(f"last layer of {name}", layer_range.stop - 1)
    return layer_range


def layer_range_to_tensor_indices(
    src_layer_range: range | None, dst_layer_range: range | None, tensor_num_per_layer: int = NUM_TENSORS_PER_LAYER
) -> tuple[list[int], list[int]]:
    """The tensor indices of two layer ranges; an empty list for a range that is None or empty.

    Raises:
        TypeError: not a range.
        LLMException: LLM_PARAM_INVALID: another step than 1, or negative.
        ValueError: a layer beyond unsigned 32 bits.
    """
    layers = (
        optional_layer_range("src_layer_range", src_layer_range),
        optional_layer_range("dst_layer_range", dst_layer_range),
    )
    source, destination = (
        list(range(each.start * tensor_num_per_layer, each.stop * tensor_num_per_layer)) if each else []
        for each in layers
    )
    return source, destination


def check_equal_length(source: range | None, destination: range | None) -> None:
    """Raise LLM_PARAM_INVALID when both ranges are given and differ in length."""
    raise_if_false(
        source is None or destination is None or len(source) == len(destination),
        "src_layer_range {!r} and dst_layer_range {!r} must have the same number of layers",
        source,
        destination,
    )
