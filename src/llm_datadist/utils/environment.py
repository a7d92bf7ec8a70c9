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


def switch_interval_us() -> str | None:
    """``LLM_DATADIST_SWITCH_INTERVAL_US``: microseconds, see ``LLMConfig.switch_interval_us``; None when unset.

    The option ``llm.SwitchIntervalUs`` (``LLMConfig.switch_interval_us``) wins over it.
    """
    return os.environ.get("LLM_DATADIST_SWITCH_INTERVAL_US")


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


def nixl_backend() -> str | None:
    """``LLM_DATADIST_NIXL_BACKEND``: the backend of NIXL, "UCX" by default; None when unset.

    The option ``llm.NixlBackend`` (``LLMConfig.nixl_backend``) wins over it.
    """
    return os.environ.get("LLM_DATADIST_NIXL_BACKEND")


def nixl_params() -> str | None:
    """``LLM_DATADIST_NIXL_PARAMS``: a JSON object with parameters of that backend; None when unset.

    The option ``llm.NixlParams`` (``LLMConfig.nixl_params``) wins over it.
    """
    return os.environ.get("LLM_DATADIST_NIXL_PARAMS")


def prepare_ucx(*, rdma: bool, tcp: bool) -> None:
    """What UCX and NIXL need before they are loaded, as far as the user has not decided it.

    Without RDMA devices UCX must not load the module for them: it crashes when the process ends. And where nobody has
    asked for it, UCX neither opens ports on the host's networks nor uses TCP, at which ours is faster. It cannot do
    without any network, however: where there is no other one it gets the loopback interface, for the GPU memory of
    processes of this host.
    """
    if not rdma:
        os.environ.setdefault("UCX_MODULES", "^ib")
    if not tcp and rdma:
        os.environ.setdefault("UCX_TLS", "^tcp")
    elif not tcp:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # what goes wrong is raised
