"""The options of one ``LLMDataDist``."""

from __future__ import annotations

from typing import Any, TypeAlias

from llm_datadist.configs.options import (
    Option,
    a_cluster_info,
    a_flag,
    a_hidden_text,
    a_number_in,
    a_str_dict,
    a_text,
    a_uint32,
    an_int,
    device_entries,
    device_ids,
    milliseconds,
    nixl_entries,
)
from llm_datadist.utils import utils

Text: TypeAlias = Option[str | None]
Flag: TypeAlias = Option[bool | None]


class LlmConfig:
    """The options of one :class:`LLMDataDist`: set properties, then pass ``generate_options()`` to ``init``.

    A setter refuses another type with TypeError, and a wrong value with LLMException (LLM_PARAM_INVALID) or, where the
    value must fit an integer type, ValueError. A property that was never set reads as its default and writes no option
    (only ``mem_utilization`` always does). Unknown attributes may be set and are ignored. ``LLMConfig`` is the same
    class.
    """

    ge_options: Option[dict[str, str]] = Option(
        dict, a_str_dict, {}, "dict of str to str: raw options. A named property wins over the same key here."
    )
    device_id: Option[int | list[int] | tuple[int, ...] | None] = Option(
        device_entries,
        device_ids,
        None,
        "Device to use, or a list or tuple of ids, of which init takes only one; 0 if not set.",
    )
    sync_kv_timeout: Option[int | str | None] = Option(
        "llm.SyncKvCacheWaitTime",
        milliseconds,
        None,
        "Milliseconds (int, or str of digits) that bound each pull, push and layer-wise step; 1000 if not set.",
    )
    listen_ip_info: Text = Option(
        "llm.listenIpInfo",
        a_text,
        "",
        "Where to listen for peers, like '192.168.1.2:26000' or '[fd00::2]:26000'; port 0: the system chooses.",
        skip_empty=True,
    )
    deploy_res_path: Text = Option("llm.deployResPath", a_text, "", "Accepted, not used.", skip_empty=True)
    buf_pool_cfg: Text = Option("llm.BufPoolCfg", a_text, "", "Accepted, not used.", skip_empty=True)
    mem_pool_cfg: Text = Option(
        "llm.MemPoolConfig",
        a_text,
        "",
        'Pool of allocate_cache on DEVICE, as JSON: {"memory_size": bytes, "page_shift": 10 to 30, default 16}.',
        skip_empty=True,
    )
    host_mem_pool_cfg: Text = Option(
        "llm.HostMemPoolConfig", a_text, "", "As mem_pool_cfg, for caches placed on HOST.", skip_empty=True
    )
    enable_cache_manager: Flag = Option(
        "llm.EnableCacheManager",
        a_flag,
        False,  # noqa: FBT003 - the default of the property
        "init needs it: set it to True, or set local_comm_res, which implies it (not shown when read here).",
    )
    enable_remote_cache_accessible: Flag = Option(
        "llm.EnableRemoteCacheAccessible",
        a_flag,
        False,  # noqa: FBT003 - the default of the property
        "Peers address each other's caches directly: needed for push; both sides of a link must agree. "
        "Implied by local_comm_res (not shown when read here).",
    )
    link_total_time: Option[int] = Option(
        "llm.LinkTotalTime",
        a_number_in(0, utils.UINT32_MAX, int),
        0,
        "Seconds within which a link of link() becomes OK or FAILED; 0 is 120.",
    )
    link_retry_count: Option[int] = Option(
        "llm.LinkRetryCount",
        a_number_in(1, 100, int),
        1,
        "1 to 100; accepted, not used: link() tries to reach a peer again until link_total_time is over.",
    )
    rdma_traffic_class: Option[int | None] = Option(
        "llm.RdmaTrafficClass",
        a_uint32,
        None,
        "Unsigned 32 bits; accepted, not used. With 'hixl' it must be a multiple of 4 up to 255.",
    )
    rdma_service_level: Option[int | None] = Option(
        "llm.RdmaServiceLevel",
        a_uint32,
        None,
        "Unsigned 32 bits; accepted, not used. With 'hixl' it must be at most 7.",
    )
    local_comm_res: Text = Option(
        "llm.LocalCommRes",
        a_text,
        "",
        "Once set, even to '', init turns enable_cache_manager and enable_remote_cache_accessible on if not set.",
    )
    transfer_backend: Text = Option(
        "llm.TransferBackend",
        a_text,
        "",
        "'hixl', or do not set it: init refuses anything else, also ''. With 'hixl' each side makes its own link, "
        "addresses are not needed to unlink, and there are no rank tables.",
    )
    global_resource_config: Text = Option(
        "llm.GlobalResourceConfig", a_text, "", "Accepted, not used. With 'hixl' it must be a JSON object."
    )
    mem_utilization: Option[float] = Option(
        "llm.MemoryUtilization", a_number_in(0.0, 1.0, float), 0.95, "0.0 to 1.0; accepted, not used."
    )
    enable_switch_role: Flag = Option(
        "llm.EnableSwitchRole",
        a_flag,
        False,  # noqa: FBT003 - the default of the property
        "Accepted; switch_role works without it.",
        skip_empty=True,
    )
    output_max_size: Option[int | None] = Option("llm.OutputMaxSize", an_int, None, "Accepted, not used.")
    cluster_info: Option[str] = Option(
        "llm.ClusterInfo",
        a_cluster_info,
        "",
        "JSON object; accepted, not used. Its listen_ip_info addresses are stored as trans_str_ip gives them.",
        skip_empty=True,
    )
    max_registered_addrs: Option[int] = Option(
        "llm.MaxRegisteredAddrs",
        a_number_in(1, 65000, int),
        240,
        "How many tensor addresses register_cache and register_blocks_cache may hold at a time, 1 to 65000.",
    )
    allow_multiple_instances: Flag = Option(
        "llm.AllowMultipleInstances",
        a_flag,
        False,  # noqa: FBT003 - the default of the property
        "Whether init may succeed although another LLMDataDist of this process is initialised.",
    )
    paths: Text = Option(
        "llm.Paths",
        a_text,
        None,
        "Transfer paths: 'auto', or a comma list, the preferred first. None: as LLM_DATADIST_PATHS says, else auto.",
    )

    huge_pages: Flag = Option(
        "llm.HugePages",
        a_flag,
        True,  # noqa: FBT003 - the default of the property
        "Whether memory of caches is moved into huge pages, which can double the speed of copies on one host. "
        "Registering may take longer by 1 s and 0.5 s a GiB; the rest follows in the background. "
        "None: as LLM_DATADIST_HUGE_PAGES says, else True.",
    )
    metrics: Flag = Option(
        "llm.Metrics",
        a_flag,
        False,  # noqa: FBT003 - the default of the property
        "Whether transfers are counted and timed, for LLMDataDist.metrics() and exporters; costs about a microsecond "
        "each. None: as LLM_DATADIST_METRICS says, else False.",
    )
    verify_transfers: Flag = Option(
        "llm.VerifyTransfers",
        a_flag,
        False,  # noqa: FBT003 - the default of the property
        "Whether the bytes of both sides are compared after each transfer that this side asks for, by digests; needs "
        "the extra 'verify' on both. None: as LLM_DATADIST_VERIFY_TRANSFERS says, else False.",
    )

    strict_constraints: Flag = Option(
        "llm.StrictConstraints",
        a_flag,
        False,  # noqa: FBT003 - the default of the property
        "Whether documented constraints of the original that this library does not have are errors, too: for programs "
        "that will be deployed there. docs/compatibility.md lists them.",
    )

    secret: Text = Option(
        "llm.Secret",
        a_hidden_text,
        None,
        "Secret, 16 bytes or more, that peers must know, too; rather use secret_file.",
    )
    secret_file: Text = Option(
        "llm.SecretFile",
        a_text,
        None,
        "File that holds the secret. None: secret, LLM_DATADIST_SECRET[_FILE], or none.",
    )
    tls_cert: Text = Option(
        "llm.TlsCert",
        a_text,
        None,
        "PEM file: certificate for TLS 1.3. None: LLM_DATADIST_TLS_CERT, ..., or no TLS.",
    )
    tls_key: Text = Option("llm.TlsKey", a_text, None, "PEM file: key of tls_cert, without a password.")
    tls_ca: Text = Option("llm.TlsCa", a_text, None, "PEM file: certificates of the CA that peers must be of, too.")
    allow_insecure_remote: Flag = Option(
        "llm.AllowInsecureRemote",
        a_flag,
        False,  # noqa: FBT003 - the default of the property
        "Link other hosts with neither secret nor TLS. None: LLM_DATADIST_ALLOW_INSECURE_REMOTE, or False.",
    )
    heartbeat_interval_ms: Option[int] = Option(
        "llm.HeartbeatIntervalMs",
        a_number_in(0, utils.INT32_MAX, int),
        10_000,
        "Milliseconds of silence after which a linked peer is asked for a sign of life; 0: never.",
    )
    heartbeat_timeout_ms: Option[int] = Option(
        "llm.HeartbeatTimeoutMs",
        a_number_in(1, utils.INT32_MAX, int),
        60_000,
        "Milliseconds without that sign of life after which the link is given up. A background thread of the peer "
        "answers, so a busy interpreter does not matter, but one that an extension holds for so long does.",
    )
    switch_interval_us: Option[int] = Option(
        "llm.SwitchIntervalUs",
        a_number_in(0, 1_000_000, int),
        500,
        "From init to finalize the switch interval of the interpreter is at most so many microseconds, for the whole "
        "process: other threads that compute in Python make way for transfers sooner than after the usual 5000. It is "
        "never made longer; 0 leaves it alone. Not set: as LLM_DATADIST_SWITCH_INTERVAL_US says, else 500.",
    )

    nixl_backend: Text = Option(
        "llm.NixlBackend",
        a_text,
        None,
        "Backend of NIXL for the path nixl, the same on both sides. None: as LLM_DATADIST_NIXL_BACKEND says, else UCX.",
    )
    nixl_params: Option[dict[str, str] | None] = Option(
        nixl_entries,
        a_str_dict,
        None,
        "dict of str to str: parameters of that backend, as NIXL takes them, like {'ucx_devices': 'mlx5_0'}. None: as "
        "LLM_DATADIST_NIXL_PARAMS, a JSON object, says, else none.",
    )

    def __init__(self) -> None:
        self.stored: dict[str, Any] = {}
        self._generated: dict[str, str] = {}
        self.ge_options = {}
        self.mem_utilization = 0.95

    @property
    def options(self) -> dict[str, str]:
        """The dict that :meth:`generate_options` fills and returns."""
        return self._generated

    def generate_options(self) -> dict[str, str]:
        """Bring the option dict up to date and return it: the same dict each time.

        A key stays in it once written, even if its property is set to None later.
        """
        for option in vars(LlmConfig).values():
            if isinstance(option, Option):
                self._generated.update(option.entries(self))
        return self._generated

    def gen_options(self) -> dict[str, str]:
        """As :meth:`generate_options`."""
        return self.generate_options()


LLMConfig = LlmConfig
