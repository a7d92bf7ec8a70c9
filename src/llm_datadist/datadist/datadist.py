"""``LLMDataDist``: one process's end of the transfer layer."""

from __future__ import annotations

import atexit
import os
import threading
from typing import TYPE_CHECKING, ClassVar, NoReturn

from llm_datadist.cache import RegisterMemStatus, int_to_mem_status_dict
from llm_datadist.cache_manager import CacheManager
from llm_datadist.configs import LLMClusterInfo, LLMRole, parse_listen_ip_info
from llm_datadist.datadist.init_options import effective_options, role_name
from llm_datadist.datadist.link_arguments import check_clusters, check_link_arguments, overall, peer_address
from llm_datadist.datadist.notifications import Notifications
from llm_datadist.status import LLMException, LLMFailedError, LLMParamInvalidError, LLMStatusCode, raise_if_true
from llm_datadist.utils import log, utils

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.engine import Engine, LinkReport, MemoryReport
    from llm_datadist.observe import Family, Observer


class _Instances:
    """The initialised objects of this process, and the one that is being initialised."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: list[LLMDataDist] = []
        self._handler_installed = False

    def take(self, instance: LLMDataDist, *, allow_several: bool) -> None:
        """Enter an object, or raise LLM_FAILED because there is one already."""
        with self._lock:
            again = any(each is instance for each in self._taken)
            if again or (self._taken and not allow_several):
                other = instance if again else self._taken[0]
                message = (
                    f"[init] failed, error code is {LLMStatusCode.LLM_FAILED}, the LLMDataDist of cluster "
                    f"{other.cluster_id} is initialised in this process: finalize it first, or, to have several, set "
                    "LLMConfig.allow_multiple_instances = True (option llm.AllowMultipleInstances = '1') for this one."
                )
                raise LLMFailedError(message, operation="init", phase="check", retryable=True)
            self._taken.append(instance)

    def publish(self) -> None:
        """Show the first live object as ``LLMDataDist.llm_engine_instance``; make sure that exit finalizes them."""
        with self._lock:
            if not self._handler_installed:
                atexit.register(_shutdown_handler)
                self._handler_installed = True
            LLMDataDist.llm_engine_instance = next(iter(self._live()), None)

    def drop(self, instance: LLMDataDist) -> None:
        """Take an object out."""
        with self._lock:
            self._taken = [each for each in self._taken if each is not instance]
            if LLMDataDist.llm_engine_instance is instance:
                LLMDataDist.llm_engine_instance = next(iter(self._live()), None)

    def forget(self) -> None:
        """In a forked child: what the parent has initialised does not work here, and does not count."""
        self._lock = threading.Lock()  # other threads of the parent may hold the old ones for ever
        for each in self._taken:
            each._ending = threading.RLock()  # noqa: SLF001 - of the parent's, which finalize leaves alone here
        self._taken = []
        LLMDataDist.llm_engine_instance = None

    def all(self) -> list[LLMDataDist]:
        """The live objects, ``llm_engine_instance`` first."""
        with self._lock:
            shown = LLMDataDist.llm_engine_instance
            return [*([shown] if shown else []), *(each for each in self._live() if each is not shown)]

    def _live(self) -> list[LLMDataDist]:
        return [each for each in self._taken if each.is_initialized]


class LLMDataDist(Notifications):
    """Links this process to others and owns its caches.

    Set an ``LLMConfig``, then ``init(config.generate_options())``, register caches through :attr:`cache_manager`, link,
    and transfer. ``init`` works once per process at a time unless ``LLMConfig.allow_multiple_instances`` is set; at
    exit of the process what is still initialised is finalized.

    Before ``init`` and after ``finalize``, everything but ``cluster_id``, ``init`` and ``finalize`` raises
    RuntimeError.

    Args:
        role: what the process does; transfers work the same way in every role.
        cluster_id: its number, unsigned 64 bits, unique among the processes that link to each other.

    Raises:
        TypeError: wrong type of an argument.
        ValueError: ``cluster_id`` does not fit.
    """

    llm_engine_instance: ClassVar[LLMDataDist | None] = None
    """The initialised object of this process (the first, if there are several), or None."""

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        utils.check_isinstance("role", role, LLMRole)
        utils.check_uint64("cluster_id", cluster_id)
        self._role = role
        self._cluster_id = cluster_id
        self._engine: Engine | None = None
        self._cache_manager: CacheManager | None = None
        self._engine_options: dict[str, str] = {}
        self._is_initialized = False
        self._ending = threading.RLock()

    # ------------------------------------------------------------ life

    @property
    def cluster_id(self) -> int:
        """The number of this process."""
        return self._cluster_id

    @property
    def is_initialized(self) -> bool:
        """Whether ``init`` succeeded and ``finalize`` was not called since."""
        return self._is_initialized

    def init(self, options: dict[str, str]) -> None:
        """Start: listen if asked to, and make the memory pools. Does nothing when already initialised.

        After a failure the object is as before, and ``init`` may be tried again; after ``finalize``, too.

        Args:
            options: from ``LLMConfig.generate_options()``; not changed.

        Raises:
            TypeError: ``options`` is no dict, or holds something else than str.
            AttributeError: ``options`` is None.
            ValueError: the port of ``llm.listenIpInfo`` is not a number.
            ModuleNotFoundError: the cache manager is not enabled.
            LLMException: LLM_FAILED: another object of the process is initialised, or listening failed;
                LLM_PARAM_INVALID: an option is wrong; LLM_OUT_OF_MEMORY: no memory for a pool.
        """
        if self._is_initialized:
            return
        several = isinstance(options, dict) and options.get("llm.AllowMultipleInstances") == "1"
        _instances.take(self, allow_several=several)
        try:
            self._start(options)
        except BaseException:
            _instances.drop(self)
            raise
        _instances.publish()

    def _start(self, options: dict[str, str]) -> None:
        effective = effective_options(options, self._role)
        from llm_datadist.engine import Engine, EngineOptions  # noqa: PLC0415 - the engine imports numpy

        engine = Engine(int(self._cluster_id), EngineOptions.parse(effective))
        self._engine_options = effective
        self._cache_manager = CacheManager(engine, effective)
        self._engine = engine
        self._is_initialized = True

    def finalize(self) -> None:
        """Stop: drop all links, forget all caches, free the pools; does nothing when not initialised.

        Takes bounded time. No transfer touches registered memory any more when it returns, from whatever thread; calls
        that run meanwhile fail.
        """
        with self._ending:
            engine, manager = self._engine, self._cache_manager
            if not self._is_initialized or engine is None or manager is None:
                return
            self._is_initialized = False
            manager.mark_finalized()
            try:
                engine.close()
            finally:
                self._engine = None
                self._cache_manager = None
                _instances.drop(self)

    @property
    def cache_manager(self) -> CacheManager:
        """The cache manager: the same object until ``finalize``."""
        self._running()
        if self._cache_manager is None:
            raise _not_initialized()
        return self._cache_manager

    @property
    def listen_address(self) -> tuple[str, int] | None:
        """The (ip, port) peers can link to, port 0 resolved to the real one; None when not listening."""
        return self._running().listen_address

    # ------------------------------------------------------------ links by address

    def link_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Link to peers that listen. A link works in both directions. Clusters are linked concurrently.

        Args:
            clusters: list or tuple: each with ``remote_cluster_id`` and one remote address, and, unless
                ``local_comm_res`` is set to some text, one local address.
            timeout: milliseconds for all of them, at least 1.

        Returns:
            An overall status, and one status per cluster. Overall: LLM_SUCCESS, or the last status that is not;
            LLM_PARAM_INVALID for an empty list. Per cluster: LLM_SUCCESS, LLM_ALREADY_LINK, LLM_PARAM_INVALID (not one
            remote address, or the two sides differ in ``enable_remote_cache_accessible``), LLM_LINK_FAILED (nobody
            listens there), LLM_TIMEOUT, LLM_FAILED.

        Raises:
            TypeError: wrong type of an argument, no ``remote_cluster_id``, or an address that is none.
            ValueError: ``timeout`` does not fit signed 32 bits.
            LLMException: LLM_PARAM_INVALID: ``timeout`` is not positive, or a cluster has no local address.
        """
        engine = self._running()
        check_clusters(clusters, timeout)
        needs_local = not self._engine_options.get("llm.LocalCommRes")
        peers = []
        for cluster in clusters:
            raise_if_true(
                needs_local and not cluster.local_ip_info_list,
                "local_ip_info_list is empty for remote cluster {}: call append_local_ip_info, or set local_comm_res",
                cluster.remote_cluster_id,
            )
            peers.append(peer_address(cluster, with_locals=True))
        return overall(engine.link_clusters(peers, int(timeout)) if peers else [])

    def unlink_clusters(
        self,
        clusters: Sequence[LLMClusterInfo],
        timeout: int = 3000,
        force: bool = False,  # noqa: FBT001, FBT002 - the original's signature
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Drop links.

        Args:
            clusters: list or tuple: each with ``remote_cluster_id`` and, without ``force``, one remote address.
            timeout: milliseconds for all of them, at least 1.
            force: only this side, without asking the peer.

        Returns:
            As :meth:`link_clusters`; a peer that is not linked is a success, one that cannot be reached
            LLM_UNLINK_FAILED.

        Raises:
            TypeError: wrong type of an argument, no ``remote_cluster_id``, or an address that is none.
            ValueError: ``timeout`` does not fit signed 32 bits.
            LLMException: LLM_PARAM_INVALID: ``timeout`` is not positive.
        """
        engine = self._running()
        check_clusters(clusters, timeout)
        utils.check_isinstance("force", force, bool)
        peers = [peer_address(cluster, with_locals=False) for cluster in clusters]
        return overall(engine.unlink_clusters(peers, int(timeout), force=bool(force)) if peers else [])

    def last_link_error(self, cluster_id: int) -> LLMException | None:
        """Why the last :meth:`link_clusters` or :meth:`unlink_clusters` for a cluster failed.

        The two return a status that several causes share; this is the whole story, and what was logged.

        Returns:
            An exception that has not been raised (the caller may): its text names address, cause and remedy, its
            ``status_code`` is the status that was returned, ``retryable`` and ``hint`` as in every LLMException. None
            if the last call for this cluster succeeded, or there was none. Failures of the last 1024 clusters are kept.

        Raises:
            TypeError: not an int.
            ValueError: does not fit unsigned 64 bits.
        """
        engine = self._running()
        utils.check_uint64("cluster_id", cluster_id)
        return engine.last_link_error(int(cluster_id))

    def switch_role(self, role: LLMRole, switch_options: dict[str, str] | None = None) -> None:
        """Take another role, or the same one: listen where the options say, or stop listening if they do not.

        Args:
            role: the new role.
            switch_options: may hold ``llm.listenIpInfo``; other keys are ignored.

        Raises:
            TypeError: wrong type of an argument.
            KeyError: ``role`` is None.
            ValueError: the port of ``llm.listenIpInfo`` is not a number.
            LLMException: LLM_EXIST_LINK: there are links; LLM_PARAM_INVALID: no good ``llm.listenIpInfo``; LLM_FAILED:
                listening failed; LLM_FEATURE_NOT_ENABLED: another address with transfer backend hixl.
        """
        engine = self._running()
        utils.check_isinstance("role", role, LLMRole)
        utils.check_isinstance("switch_options", switch_options, dict)
        role_name(role)
        strict = self._engine_options.get("llm.StrictConstraints") == "1" and role == LLMRole.PROMPT
        raise_if_true(
            strict and "llm.listenIpInfo" not in (switch_options or {}),
            "switch_role to PROMPT needs llm.listenIpInfo, as in the original (LLMConfig.strict_constraints is set)",
        )
        listen = None
        if switch_options and "llm.listenIpInfo" in switch_options:
            listen = parse_listen_ip_info(switch_options["llm.listenIpInfo"])
        engine.switch_role(listen)
        self._role = role

    def explain_link(self, cluster_id: int) -> LinkReport:
        """Tell which transfer path the link to a peer uses, and why each other one is not used; readable by ``str()``.

        Raises:
            TypeError: not an int.
            ValueError: does not fit unsigned 64 bits.
            LLMException: LLM_NOT_YET_LINK: there is no link to this peer.
        """
        engine = self._running()
        utils.check_uint64("cluster_id", cluster_id)
        return engine.explain(int(cluster_id))

    def is_reached_by(self, cluster_id: int) -> bool:
        """Whether a peer's transfers may still read or write memory here.

        They may while it is linked, and after that, whoever has ended the link, until its last one has ended: a peer
        that is stopped in the middle of a copy goes on with it when it wakes up. False for one that was never linked.

        Raises:
            TypeError: not an int.
            ValueError: does not fit unsigned 64 bits.
        """
        engine = self._running()
        utils.check_uint64("cluster_id", cluster_id)
        return engine.is_reached_by(int(cluster_id))

    def metrics(self) -> tuple[Family, ...]:
        """What this object holds now, and with ``LLMConfig.metrics`` what has happened since ``init``.

        Now: links, caches, transfers that run. Since: transfers by operation, path and status, bytes, time by phase.
        ``llm_datadist.observe.prometheus`` exports them. Names, labels and units: docs/metrics.md.

        Raises:
            RuntimeError: not initialised.
        """
        return self._running().metrics()

    def observe(self, observer: Observer) -> None:
        """Tell an observer (``llm_datadist.observe.Observer``) what happens from now on.

        That is every transfer of this process, at its end, and every request of a peer that was served over a data
        connection; on the thread on which it happens.

        Raises:
            RuntimeError: not initialised.
        """
        self._running().observe(observer)

    def unobserve(self, observer: Observer) -> None:
        """Tell it no longer; without effect if it was not told.

        Raises:
            RuntimeError: not initialised.
        """
        self._running().unobserve(observer)

    def explain_memory(self) -> MemoryReport:
        """Tell how much of the memory of this side's caches is in huge pages, and why the rest is not; see ``str()``.

        Where it is not, copies between processes of one host may run at half speed. Looks at every mapping of the
        process, which may take some milliseconds: nothing to call for each transfer.
        """
        return self._running().explain_memory()

    # ------------------------------------------------------------ links by rank table

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str | None) -> int:
        """Link the members of a rank table; every member makes the same call.

        Returns before the link is ready: wait until :meth:`query_register_mem_status` says OK.

        Args:
            comm_name: name of the link, 1 to 127 characters, the same at every member.
            cluster_rank_info: from cluster id to rank in the table, 2 to 4 members in the order of their ranks, this
                process among them.
            rank_table: JSON text.

        Returns:
            The number of the link, 1, 2, 3, ... since ``init``.

        Raises:
            TypeError: wrong type of an argument.
            AttributeError: ``cluster_rank_info`` is None.
            ValueError: a cluster id does not fit unsigned 64 bits, or a rank unsigned 32 bits.
            LLMException: LLM_PARAM_INVALID: a wrong name, number or order of members, this process is none of them, or
                a table that does not work.
        """
        engine = self._running()
        check_link_arguments(comm_name, cluster_rank_info, rank_table)
        comm_id = engine.link(comm_name, {int(key): int(rank) for key, rank in cluster_rank_info.items()}, rank_table)
        self.cache_manager.set_is_call_linked()
        return comm_id

    def unlink(self, comm_id: int) -> None:
        """Drop a link of :meth:`link`; waits for its preparation to end.

        Raises:
            TypeError: not an int.
            ValueError: does not fit unsigned 64 bits.
            LLMException: LLM_NOT_YET_LINK: no such link.
        """
        engine = self._running()
        utils.check_uint64("comm_id", comm_id)
        engine.unlink(int(comm_id))

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """How far a link of :meth:`link` is: PREPARING becomes OK or FAILED within ``LLMConfig.link_total_time``.

        Raises:
            TypeError: not an int.
            ValueError: does not fit unsigned 64 bits.
            LLMException: LLM_NOT_YET_LINK: no such link.
        """
        engine = self._running()
        utils.check_uint64("comm_id", comm_id)
        status = engine.query_register_mem_status(int(comm_id))
        return int_to_mem_status_dict.get(status.value, RegisterMemStatus.FAILED)

    # ------------------------------------------------------------ the original's older mode

    @property
    def kv_cache_manager(self) -> NoReturn:
        """Manager of the original's older mode, which this library does not have: raises LLM_PARAM_INVALID."""
        self._running()
        _refuse_older_mode("kv_cache_manager", "use cache_manager")

    def check_link_status(self, remote_cluster_id: int) -> NoReturn:  # noqa: ARG002 - the original's signature
        """Call of the original's older mode, which this library does not have: raises LLM_PARAM_INVALID."""
        self._running()
        _refuse_older_mode("check_link_status", "use query_register_mem_status or explain_link")

    def _running(self) -> Engine:
        engine = self._engine
        if not self._is_initialized or engine is None:
            raise _not_initialized()
        return engine


_instances = _Instances()
os.register_at_fork(after_in_child=_instances.forget)


def _shutdown_handler() -> None:
    """Finalize what is still initialised; runs at exit."""
    for instance in _instances.all():
        try:
            instance.finalize()
        except LLMException as error:
            log.error("finalize at exit failed: %s", error)


def _not_initialized() -> RuntimeError:
    return RuntimeError("LLMDataDist is not initialised (never, or finalize was called): call init(options) first")


def _refuse_older_mode(name: str, remedy: str) -> NoReturn:
    status = LLMStatusCode.LLM_PARAM_INVALID
    message = f"[{name}] failed, error code is {status}, it is not available with the cache manager: {remedy}."
    raise LLMParamInvalidError(message, operation=name, phase="check", hint=remedy)
