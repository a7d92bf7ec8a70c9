"""A model that leaves as much KV cache as the example's, for a fraction of the computing.

Where an accelerator computes 1,500 tokens in milliseconds, a processor without wide units takes seconds, and two
engines on it differ by more than what prefill and decode apart add. Its weights are random: what they compute does not
count here, only what goes on around it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from model import make

if TYPE_CHECKING:
    from pathlib import Path

_MAKE: Final = """
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
folder, out = sys.argv[1:]
config = AutoConfig.from_pretrained(folder)
config.num_attention_heads = config.num_key_value_heads
config.hidden_size = config.intermediate_size = config.num_attention_heads * config.head_dim
torch.manual_seed(7)
AutoModelForCausalLM.from_config(config, dtype="bfloat16").save_pretrained(out)
AutoTokenizer.from_pretrained(folder).save_pretrained(out)
"""


def thin(model: Path) -> Path:
    """The folder of the thin model beside the one of ``model``; made once."""
    out = model.with_name(f"{model.name}-thin")
    if not (out / "config.json").exists():
        make(out, _MAKE, str(model))
    return out
