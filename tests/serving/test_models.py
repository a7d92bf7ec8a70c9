"""Kinds of models between a prefill and a decode engine, token by token and page by page.

The small ones have random weights: what counts is where their KV lies.
"""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from client import PREFILL
from engines import ENVIRONMENT, ours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent
START_S = 240.0
VOCABULARY = 1000
GEMMA = """
from transformers import Gemma3ForCausalLM as Model, Gemma3TextConfig
kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
config = Gemma3TextConfig(
    vocab_size={vocabulary}, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, query_pre_attn_scalar=64, sliding_window=256, layer_types=kinds,
)
"""
DEEPSEEK = """
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM as Model
config = DeepseekV2Config(
    vocab_size={vocabulary}, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=2, q_lora_rank=None, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128,
    v_head_dim=128, first_k_dense_replace=3,
)
"""
MAKE = """
import sys, torch
torch.manual_seed(7)
{config}
Model(config).save_pretrained(sys.argv[1])
"""


class Offline:
    """An engine in a process of its own."""

    def __init__(self, name: str, logs: Path, model: Path, role: str, **settings: Any) -> None:
        transfer = ours(role) | {"kv_connector": "WatchedConnector", "kv_connector_module_path": "watched_connector"}
        settings = {"model": str(model), "kv_transfer_config": transfer, **settings}
        self._log = logs / f"{name}.log"
        self._answers, there = os.pipe()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "offline_engine.py"), json.dumps(settings), str(there)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[there],
                env=os.environ | ENVIRONMENT,
            )
        os.close(there)
        self._lines = os.fdopen(self._answers)

    def complete(self, prompt: list[int], count: int, params: Any = None, pages: int = 0) -> dict[str, Any]:
        """The answer of the engine."""
        assert self._process.stdin is not None
        order = {"prompt": prompt, "count": count, "params": params, "pages": pages}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._answers], [], [], START_S)
        line = self._lines.readline() if ready else ""
        assert line, self._log.read_text(errors="replace")[-3000:]
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate(timeout=30)
        self._lines.close()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Callable[..., list[Offline]]]:
    """Starts a prefill and a decode engine."""
    made: list[Offline] = []

    def start(model: Path, **settings: Any) -> list[Offline]:
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
            made.append(Offline(name, tmp_path, model, role, **settings))
        return made

    yield start
    for engine in made:
        engine.close()


def invented(folder: Path, config: str) -> Path:
    """A model with random weights."""
    script = MAKE.format(config=config.format(vocabulary=VOCABULARY))
    subprocess.run([sys.executable, "-c", script, str(folder)], check=True, timeout=START_S)
    return folder


def random_prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(10, VOCABULARY), k=length)


def pages_are_equal(prefill: Offline, decode: Offline, layers: int, block_size: int) -> None:
    """The decode engine computes the last token again, the rest it has from the other."""
    for seed, length in enumerate((block_size + 1, 3 * block_size, 1500)):
        prompt = random_prompt(seed, length)
        whole = (length - 1) // block_size
        first = prefill.complete(prompt, 1, PREFILL, whole)
        second = decode.complete(prompt, 4, first["params"], whole)
        assert len(first["pages"]) == layers
        assert [len(each) for each in first["pages"].values()] == [whole] * layers
        assert second["pages"] == first["pages"]
        assert first["loaded"] == 0
        assert second["loaded"] >= whole * block_size


def test_pages_of_bfloat16_are_equal(model: Path, engines: Callable[..., list[Offline]]) -> None:
    pages_are_equal(*engines(model, dtype="bfloat16", block_size=32), layers=30, block_size=32)


def test_pages_of_mla_are_equal(tmp_path: Path, engines: Callable[..., list[Offline]]) -> None:
    model = invented(tmp_path / "deepseek", DEEPSEEK)
    pages_are_equal(*engines(model, dtype="bfloat16", block_size=16), layers=3, block_size=16)


def test_tokens_of_three_groups_are_equal(tmp_path: Path, engines: Callable[..., list[Offline]]) -> None:
    """Also where prompts end at the edge of a block or of a window."""
    model = invented(tmp_path / "gemma", GEMMA)
    prefill, decode = engines(model, dtype="float32", block_size=32)
    for seed, length in enumerate((5, 31, 32, 33, 255, 256, 257, 288, 289, 600, 1500)):
        prompt = random_prompt(100 + seed, length)
        first = prefill.complete(prompt, 1, PREFILL)
        assert first["groups"] == 3
        there = decode.complete(prompt, 8, first["params"])
        here = prefill.complete(prompt, 8)
        assert there["tokens"] == here["tokens"], length
        assert there["groups"] == 3
        assert there["loaded"] >= length - 1
