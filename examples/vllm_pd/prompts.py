"""Prompts of the example: text that every Python has, cut to lengths in tokens."""

from __future__ import annotations

import argparse
import asyncio
import functools
import inspect
import logging
import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

SHORT, MIDDLE, LONG = "short", "middle", "long"
LENGTHS: Final = {
    SHORT: (5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16),
    MIDDLE: (40, 90, 127, 128, 129, 200, 256, 300, 350, 384, 411, 600),
    LONG: (1000, 1024, 1280, 1400, 1499, 1500),
}
"""Thirty prompts from 5 to 1,500 tokens, some of them whole blocks."""


def _text() -> str:
    parts = [inspect.getdoc(module) or "" for module in (argparse, asyncio, logging, threading)]
    for module in (argparse, logging, threading, asyncio):
        parts += [inspect.getdoc(getattr(module, name)) or "" for name in sorted(dir(module))]
    return "\n\n".join(part for part in dict.fromkeys(parts) if part)


@functools.cache
def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model))


def prompts(model: Path, seed: int = 0) -> dict[str, list[str]]:
    """Prompts by kind; another seed gives others of the same lengths, without a common beginning."""
    tokenizer = _tokenizer(model)
    tokens = tokenizer(_text(), add_special_tokens=False)["input_ids"]
    found: dict[str, list[str]] = {}
    at = 37 * seed
    for kind, lengths in LENGTHS.items():
        found[kind] = []
        for length in lengths:
            at = (at + 211) % (len(tokens) - length)
            found[kind].append(tokenizer.decode(tokens[at : at + length]))
    return found
