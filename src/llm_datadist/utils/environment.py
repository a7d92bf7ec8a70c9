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


def metrics() -> str | None:
    """``LLM_DATADIST_METRICS``: "1" or "0", whether transfers are counted; None when unset.

    The option ``llm.Metrics`` (``LLMConfig.metrics``) wins over it.
    """
    return os.environ.get("LLM_DATADIST_METRICS")


def verify_transfers() -> str | None:
    """``LLM_DATADIST_VERIFY_TRANSFERS``: "1" or "0", whether transfers are verified; None when unset.

    The option ``llm.VerifyTransfers`` (``LLMConfig.verify_transfers``) wins over it.
    """
    return os.environ.get("LLM_DATADIST_VERIFY_TRANSFERS")


def secret() -> str | None:
    """``LLM_DATADIST_SECRET``: the shared secret itself; None when unset.

    The options ``llm.Secret`` and ``llm.SecretFile`` (``LLMConfig.secret``, ``LLMConfig.secret_file``) win over it.
    """
    return os.environ.get("LLM_DATADIST_SECRET")


def secret_file() -> str | None:
    """``LLM_DATADIST_SECRET_FILE``: a file that holds the shared secret; None when unset. As for ``secret``."""
    return os.environ.get("LLM_DATADIST_SECRET_FILE")


def tls_file(what: str) -> str | None:
    """``LLM_DATADIST_TLS_CERT``, ``..._KEY`` and ``..._CA`` for "cert", "key" and "ca": PEM files; None when unset.

    The options ``llm.TlsCert``, ``llm.TlsKey`` and ``llm.TlsCa`` (``LLMConfig.tls_cert``, ...) win over them.
    """
    return os.environ.get(f"LLM_DATADIST_TLS_{what.upper()}")


def allow_insecure_remote() -> str | None:
    """``LLM_DATADIST_ALLOW_INSECURE_REMOTE``: "1" or "0", see ``LLMConfig.allow_insecure_remote``; None when unset.

    The option ``llm.AllowInsecureRemote`` wins over it.
    """
    return os.environ.get("LLM_DATADIST_ALLOW_INSECURE_REMOTE")
