"""Where the connector logs: below vLLM's own logger, so that its handlers and levels hold."""

from __future__ import annotations

import logging

logger: logging.Logger = logging.getLogger("vllm.llm_datadist")
