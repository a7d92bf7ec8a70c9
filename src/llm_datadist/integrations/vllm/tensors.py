"""A worker's KV tensors, as vLLM has them: how they are cut, and what other engines must know about them."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any, Final

import vllm
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from llm_datadist.integrations.vllm.pages import View, arrange
from llm_datadist.integrations.vllm.params import CacheFacts, Facts

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    from llm_datadist.integrations.vllm.pages import Pages

_KINDS: Final = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
_TOKEN_MAJOR: Final = ("CPU_MLA",)
"""Attention backends whose pages are known to lie in the order of the tokens; those of CPU_ATTN do not."""


def check(config: VllmConfig, kv_cache_config: KVCacheConfig, mode: str) -> None:
    """Refuse what the connector cannot move.

    Raises:
        ValueError: names it.
    """
    parallel = config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            text = f"LLMDataDistConnector needs {name}=1, but it is {getattr(parallel, name)}"
            raise ValueError(text)
    balanced = parallel.data_parallel_index and not parallel.data_parallel_external_lb
    if mode == "push" and balanced and config.kv_transfer_config.is_kv_producer:
        text = (
            "LLMDataDistConnector cannot push from one of several data-parallel engines behind one server, which says "
            "where a request's KV comes from before one of them is chosen: use mode 'pull', or start a server for each "
            "(decode engines may: their kv_role is kv_consumer)"
        )
        raise ValueError(text)
    for number, group in enumerate(kv_cache_config.transfer_groups):
        if type(group.kv_cache_spec) not in _KINDS:
            known = ", ".join(kind.__name__ for kind in _KINDS)
            kind = type(group.kv_cache_spec).__name__
            text = f"KV group {number} of this model is a {kind}; LLMDataDistConnector moves {known}"
            raise ValueError(text)


def check_push(kv_caches: dict[str, torch.Tensor]) -> None:
    """Refuse to push from a device: vLLM's hooks say that a layer was launched there, not that its KV is final.

    Raises:
        ValueError: names the device.
    """
    for layer, tensor in kv_caches.items():
        if tensor.device.type != "cpu":
            text = f"mode 'push' needs KV in host memory, but that of layer {layer} is on {tensor.device}: use 'pull'"
            raise ValueError(text)


def pages_of(
    tensors: dict[str, torch.Tensor], config: VllmConfig, kv_cache_config: KVCacheConfig
) -> list[tuple[Pages, KVCacheSpec]]:
    """How the tensors are cut, in a fixed order, with their groups' specifications."""
    backend = _backends(config)
    found: list[tuple[Pages, KVCacheSpec]] = []
    for number, group in enumerate(kv_cache_config.transfer_groups):
        views = [
            _view(name, tensors[name], kv_cache_config.num_blocks) for name in group.layer_names if name in tensors
        ]
        token_major = backend in _TOKEN_MAJOR
        arranged = arrange(views, number, group.kv_cache_spec.block_size, token_major=token_major)
        found += [(pages, group.kv_cache_spec) for pages in arranged]
    return found


def _view(layer: str, tensor: torch.Tensor, blocks: int) -> View:
    """Dimension 0 counts blocks, or the parts that a kernel cuts them into; dimension 1 heads, if there are four."""
    item = tensor.element_size()
    per_block, rest = divmod(tensor.shape[0], blocks)
    if rest or not per_block:
        text = f"layer {layer}: its KV tensor of shape {tuple(tensor.shape)} does not begin with {blocks} blocks"
        raise ValueError(text)
    stride = tensor.stride(0) * item * per_block
    part = 1 + sum((size - 1) * step for size, step in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    if part != tensor[0].numel():
        text = f"layer {layer}: the bytes of a block have gaps (shape {tuple(tensor.shape)}, strides {tensor.stride()})"
        raise ValueError(text)
    heads = tensor.shape[1] if tensor.dim() == 4 and per_block == 1 else 1  # noqa: PLR2004
    if heads > 1 and tensor.stride(1) * heads != part:
        heads = 1  # not the outermost dimension of a page, so a page cannot be cut by head
    page = part * item if per_block == 1 else stride
    return View(layer, tensor.data_ptr(), blocks, page, stride, heads)


def facts(config: VllmConfig, found: list[tuple[Pages, KVCacheSpec]]) -> Facts:
    """What other engines must agree on."""
    ranks = config.parallel_config.tensor_parallel_size
    total = config.model_config.get_total_num_kv_heads()
    return Facts(
        engine_version=vllm.__version__,
        model=config.model_config.model.rstrip("/").rsplit("/", 1)[-1],
        dtype=str(config.model_config.dtype),
        cache_dtype=str(config.cache_config.cache_dtype),
        page_format=_page_format(config, found),
        ranks=ranks,
        caches=tuple(_cache_facts(pages, spec, ranks, total, mla=config.model_config.use_mla) for pages, spec in found),
    )


def _cache_facts(pages: Pages, spec: KVCacheSpec, ranks: int, total: int, *, mla: bool) -> CacheFacts:
    shape = pages.shape
    replicas = ranks if mla else max(1, ranks // total)
    return CacheFacts(
        group=shape.group,
        kind=type(spec).__name__,
        layers=len(pages.addresses),
        heads=shape.heads * ranks // replicas,
        replicas=replicas,
        piece_bytes=shape.piece_bytes,
        piece_tokens=shape.piece_tokens,
        block_tokens=shape.tokens,
        stride=shape.stride,
    )


def _backends(config: VllmConfig) -> str:
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends  # noqa: PLC0415 - heavy

    return "+".join(sorted({backend.get_name() for backend in get_current_attn_backends(config)}))


def _page_format(config: VllmConfig, found: list[tuple[Pages, KVCacheSpec]]) -> str:
    """Backends, and what their page format depends on: the CPU backend packs keys as its instruction set likes it."""
    backend = _backends(config)
    if backend != "CPU_ATTN":
        return backend
    return "+".join(
        [backend, platform.machine(), *sorted({_packing(config, pages.shape.tokens) for pages, _ in found})]
    )


def _packing(config: VllmConfig, tokens: int) -> str:
    from vllm.v1.attention.backends import cpu_attn  # noqa: PLC0415 - only there on a CPU

    model = config.model_config
    choose: Any = getattr(cpu_attn, "_get_attn_isa", None)
    if choose is None:
        return "unknown"
    return str(choose(model.dtype, tokens, model.get_head_size(), config.cache_config.cache_dtype))
