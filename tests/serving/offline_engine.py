"""A vLLM engine without a server: answers orders, a line of JSON each, and tells of the pages of its last request."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt
from watched_connector import WatchedConnector


def answer(llm: LLM, order: dict[str, Any]) -> dict[str, Any]:
    """Complete a prompt greedily."""
    WatchedConnector.loaded = 0
    sampling = SamplingParams(
        temperature=0,
        max_tokens=order["count"],
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": order["params"]} if order["params"] else None,
    )
    (found,) = llm.generate([TokensPrompt(prompt_token_ids=order["prompt"])], sampling, use_tqdm=False)
    return {
        "tokens": list(found.outputs[0].token_ids),
        "params": found.kv_transfer_params,
        "loaded": WatchedConnector.loaded,
        "groups": len(WatchedConnector.blocks),
        "pages": WatchedConnector.pages(order["pages"]) if order["pages"] else {},
    }


def main() -> None:
    """Serve until the pipe is closed."""
    settings, out = json.loads(sys.argv[1]), os.fdopen(int(sys.argv[2]), "w")
    llm = LLM(**settings, enforce_eager=True, max_model_len=2048, skip_tokenizer_init=True, disable_log_stats=True)
    WatchedConnector.num_blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    for line in sys.stdin:
        out.write(json.dumps(answer(llm, json.loads(line))) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
