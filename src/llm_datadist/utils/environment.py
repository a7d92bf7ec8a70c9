"""The environment variables of the library; no other module reads any."""

from __future__ import annotations

import os


def log_level() -> str | None:
    """``ASCEND_GLOBAL_LOG_LEVEL``: "0" DEBUG, "1" INFO, "2" WARNING, "3" ERROR; None when unset."""
    return os.environ.get("ASCEND_GLOBAL_LOG_LEVEL")


def paths() -> str | None:
    """``LLM_DATADIST_PATHS``: "auto" or a comma list of transfer paths in order of preference; None when unset.

    The option ``llm.Paths`` (``LLMConfig.paths``) wins over it.
    """
    return os.environ.get("LLM_DATADIST_PATHS")


def huge_pages() -> str | None:
    """``LLM_DATADIST_HUGE_PAGES``: "1" or "0", whether memory of caches is to be in huge pages; None when unset.

    The option ``llm.HugePages`` (``LLMConfig.huge_pages``) wins over it.
    """
    return os.environ.get("LLM_DATADIST_HUGE_PAGES")


def verify_transfers() -> str | None:
    """``LLM_DATADIST_VERIFY_TRANSFERS``: "1" or "0", whether transfers are verified; None when unset.

    The option ``llm.VerifyTransfers`` (``LLMConfig.verify_transfers``) wins over it.
    """
    return os.environ.get("LLM_DATADIST_VERIFY_TRANSFERS")
