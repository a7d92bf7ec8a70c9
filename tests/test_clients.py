"""What real connectors silently rely on, one test for each assumption."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from expect import expect
from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
    RegisterMemStatus,
)
from peers import GUARD, TIMEOUT_S, Node
from test_links import free_port, pull_one, with_caches

if TYPE_CHECKING:
    from peers import Peers

OK = LLMStatusCode.LLM_SUCCESS


def test_cluster_ids_use_all_64_bits(peers: Peers) -> None:
    """Ip << 32 | port << 16 | rank, and random ids up to 2**64 - 1."""
    server, client = peers.make(0xC0A8_0101_6590_0007), peers.make(2**64 - 1, listen=False)
    with_caches(server, client)
    assert client.link(server) == OK
    client.call(pull_one, server.cluster_id)
    server.call(pull_one, client.cluster_id)


def test_cache_ids_count_from_one_in_registration_order(peers: Peers) -> None:
    """On both sides, shared by all kinds of registration and by allocation, and again after a new init."""
    pool = '{"memory_size": 1048576}'
    for peer in (peers.make(1, mem_pool_cfg=pool), peers.make(2, mem_pool_cfg=pool)):
        for _ in range(2):
            assert peer.call("register_blocks", "a", 2, 4, 512) == 1
            assert peer.call("register_contiguous", "b", 2, 4, 512) == 2
            assert peer.call(allocate) == 3
            assert peer.call("register_blocks", "c", 2, 4, 512) == 4
            peer.call("finalize")
            peer.call(init_again)


def allocate(node: Node) -> int:
    """In the child."""
    cache_id: int = node.manager.allocate_cache(CacheDesc(2, [1, 512], DataType.DT_UINT8)).cache_id
    return cache_id


def init_again(node: Node) -> None:
    """In the child: the same object, the same options."""
    node.caches.clear()
    node.datadist.init(node.config.generate_options())


def test_same_cache_id_on_both_sides_names_the_counterpart(peers: Peers) -> None:
    """One cache per layer tensor; the pusher uses its own id for the peer's cache."""
    server, client = peers.make(1), peers.make(2, listen=False)
    for peer in (server, client):
        for layer in range(3):
            seed = layer if peer is client else None
            assert peer.call("register_contiguous", f"layer{layer}", 1, 2, 512, seed=seed) == layer + 1
    assert client.link(server) == OK
    for layer in range(3):
        client.call(push_layer, layer)
        assert (
            server.memory(f"layer{layer}")[0][: GUARD + 512] == client.memory(f"layer{layer}")[0][: GUARD + 512]
        ).all()


def push_layer(node: Node, layer: int) -> None:
    """In the child."""
    cache = node.caches[f"layer{layer}"]
    node.manager.push_cache(CacheKeyByIdAndIndex(1, cache.cache_id, 0), cache, tensor_num_per_layer=1)


def test_push_over_a_link_that_only_the_peer_made(peers: Peers) -> None:
    """P pushes positionally, one tensor a layer, over a link that D made."""
    prefill, decode = peers.make(1), peers.make(2, listen=False)
    prefill.call("register_blocks", "kv", 3, 8, 512, model_id=0, seed=1)
    decode.call("register_blocks", "kv", 3, 8, 512, model_id=0)
    assert decode.link(prefill) == OK
    prefill.call(push_positionally, 2)
    source, target = prefill.memory("kv"), decode.memory("kv")
    for tensor in range(3):
        assert (target[tensor][GUARD : GUARD + 512] == source[tensor][GUARD + 512 : GUARD + 1024]).all()


def push_positionally(node: Node, cluster_id: int) -> None:
    """In the child: as the connector calls it."""
    node.manager.push_blocks(BlocksCacheKey(cluster_id, 0), node.caches["kv"], [1], [0], range(3), range(3), 1)


def test_both_sides_force_unlink_without_addresses(peers: Peers) -> None:
    """One after the other and at the same time; both get LLM_SUCCESS."""
    one, two = peers.make(1), peers.make(2)
    for _ in range(10):
        assert one.link(two) == OK
        futures = [one.begin("unlink", 2, force=True), two.begin("unlink", 1, force=True)]
        assert [future.result(TIMEOUT_S) for future in futures] == [OK, OK]
    assert one.link(two) == OK
    assert one.call("unlink", 2, force=True) == OK
    assert two.call("unlink", 1, force=True) == OK


def rank_table(devices: list[dict[str, str]], *, own_first: str) -> str:
    """A rank table of one server that lists the device with rank ``own_first`` first."""
    ordered = sorted(devices, key=lambda device: device["rank_id"] != own_first)
    server = {"device": ordered, "server_id": "127.0.0.1"}
    return json.dumps({"version": "1.0", "server_count": "1", "status": "completed", "server_list": [server]})


def two_devices(**ports: int) -> list[dict[str, str]]:
    """Two devices on this host."""
    return [
        {"device_id": str(rank), "device_ip": "127.0.0.1", "rank_id": str(rank), "device_port": str(port)}
        for rank, port in enumerate(ports.values())
    ]


def link_by_table(node: Node, name: str, ranks: dict[int, int], table: str) -> RegisterMemStatus:
    """In the child: link and poll as connectors do, without a fixed sleep."""
    comm_id = node.datadist.link(name, ranks, table)
    node.extra["comm"] = comm_id
    pause = threading.Event()
    for _ in range(6000):
        status = node.datadist.query_register_mem_status(comm_id)
        if status != RegisterMemStatus.PREPARING:
            break
        pause.wait(0.01)
    return status


def unlink_comm(node: Node) -> None:
    """In the child."""
    node.datadist.unlink(node.extra["comm"])


def test_rank_tables_may_differ_in_order(peers: Peers) -> None:
    """Each side lists its own device first; nobody listens on a configured address."""
    one, two = peers.make(11, listen=False, link_total_time=30), peers.make(12, listen=False, link_total_time=30)
    with_caches(one, two)
    devices = two_devices(a=free_port(), b=free_port())
    ranks = {11: 0, 12: 1}
    futures = [
        one.begin(link_by_table, "pair", ranks, rank_table(devices, own_first="0")),
        two.begin(link_by_table, "pair", ranks, rank_table(devices, own_first="1")),
    ]
    assert [future.result(TIMEOUT_S) for future in futures] == [RegisterMemStatus.OK] * 2
    one.call(pull_one, 12)
    two.call(pull_one, 11)
    for future in [one.begin(unlink_comm), two.begin(unlink_comm)]:
        future.result(TIMEOUT_S)
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: one.call(pull_one, 12))


def test_link_in_the_answering_order_does_not_deadlock(peers: Peers) -> None:
    """The first caller waits in the background: link() itself returns before the other side has called."""
    one, two = peers.make(11, listen=False, link_total_time=30), peers.make(12, listen=False, link_total_time=30)
    devices = two_devices(a=free_port(), b=free_port())
    ranks = {11: 0, 12: 1}
    table = rank_table(devices, own_first="0")
    assert two.call(link_only, "pair", ranks, table) == 1
    assert one.call(link_by_table, "pair", ranks, table) == RegisterMemStatus.OK
    assert one.call(link_only, "again", ranks, table) == 2
    assert two.call(link_by_table, "again", ranks, table) == RegisterMemStatus.OK


def link_only(node: Node, name: str, ranks: dict[int, int], table: str) -> int:
    """In the child."""
    return node.datadist.link(name, ranks, table)


@pytest.mark.parametrize("properties", [{"local_comm_res": ""}, {}])
def test_local_port_zero(peers: Peers, properties: dict[str, Any]) -> None:
    """Clients name their own address with port 0."""
    server, client = peers.make(1, **properties), peers.make(2, listen=False, **properties)
    with_caches(server, client)
    assert client.link(server) == OK
    client.call(pull_one, 1)


def test_local_comm_res_alone_turns_everything_on(peers: Peers) -> None:
    """Cache manager and remote access come by themselves."""
    off = {"enable_cache_manager": None, "enable_remote_cache_accessible": None, "local_comm_res": ""}
    server, client = peers.make(1, **off), peers.make(2, listen=False, **off)
    with_caches(server, client)
    assert client.link(server) == OK
    client.call(pull_one, 1)


def test_32_threads_pull_many_small_lists(peers: Peers) -> None:
    """One block list per contiguous run, from a thread pool, all over one link."""
    server, client = peers.make(1), peers.make(2, listen=False)
    server.call("register_blocks", "src", 2, 256, 512, model_id=0, seed=4)
    client.call("register_blocks", "dst", 2, 256, 512)
    assert client.link(server) == OK
    client.call(pull_from_threads, 1)
    source, target = server.memory("src"), client.memory("dst")
    for tensor in range(2):
        assert (source[tensor] == target[tensor])[GUARD:-GUARD].all()


def pull_from_threads(node: Node, cluster_id: int) -> None:
    """In the child."""

    def pull(block: int) -> None:
        node.manager.pull_blocks(BlocksCacheKey(cluster_id, 0), node.caches["dst"], [block], [block])

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(pull, range(256), timeout=TIMEOUT_S))


def test_restarted_peer_with_same_id_and_port(peers: Peers) -> None:
    """Link, kill, restart with the same id and port, pull fails, force unlink, link, pull."""
    server, client = peers.make(1), peers.make(2, listen=False)
    with_caches(server, client)
    assert client.link(server) == OK
    client.call(pull_one, 1)
    address = server.address
    assert address is not None
    for seed in (21, 22):
        server.process.kill()
        server = peers.make(1, listen_ip_info=f"{address[0]}:{address[1]}")
        server.call("register_blocks", "src", 2, 4, 512, model_id=0, seed=seed)
        with pytest.raises(LLMException):
            client.call(pull_one, 1)
        assert client.call("unlink", 1, force=True) == OK
        assert client.link(server) == OK
        client.call(pull_one, 1)
        assert (client.memory("dst")[1][GUARD : GUARD + 512] == server.memory("src")[1][GUARD : GUARD + 512]).all()


def test_switch_role_moves_the_listener_to_the_peer(peers: Peers) -> None:
    """P stops listening, D listens on that very port, P links to D and D pushes to P."""
    prefill = peers.make(1, local_comm_res="")
    decode = peers.make(2, listen=False, local_comm_res="")
    with_caches(prefill, decode)
    address = prefill.address
    assert address is not None
    assert decode.link(prefill) == OK
    decode.call(pull_one, 1)
    expect(LLMStatusCode.LLM_EXIST_LINK, lambda: prefill.call(switch_role, LLMRole.DECODER, None))
    assert decode.call("unlink", 1, address) == OK
    prefill.call(switch_role, LLMRole.DECODER, None)
    decode.call(switch_role, LLMRole.PROMPT, f"{address[0]}:{address[1]}")
    assert prefill.call("link", 2, address) == OK
    decode.call(push_back, 1)
    assert (prefill.memory("src")[1][GUARD : GUARD + 512] == decode.memory("dst")[1][GUARD : GUARD + 512]).all()


def switch_role(node: Node, role: LLMRole, listen: str | None) -> None:
    """In the child: with the whole option dictionary, as the sample does, or without options."""
    if listen is None:
        node.datadist.switch_role(role)
        return
    node.config.listen_ip_info = listen
    node.datadist.switch_role(role, node.config.generate_options())


def push_back(node: Node, cluster_id: int) -> None:
    """In the child."""
    node.manager.push_blocks(BlocksCacheKey(cluster_id, 0), node.caches["dst"], [0], [0], tensor_num_per_layer=1)


def test_finalize_and_init_again_on_one_object(peers: Peers) -> None:
    """Sleep and wake: registered, linked and pulled again, several times."""
    server, client = peers.make(1), peers.make(2, listen=False)
    with_caches(server)
    for _ in range(3):
        client.call("register_blocks", "dst", 2, 4, 512)
        assert client.link(server) == OK
        client.call(pull_one, 1)
        client.call("finalize")
        client.call(init_again)


def test_two_caches_under_one_key_last_wins(peers: Peers) -> None:
    """The newer blocks cache of a model takes the key over, also for a peer that knew the older one."""
    server, client = peers.make(1), peers.make(2, listen=False)
    with_caches(server, client)
    assert client.link(server) == OK
    client.call(pull_one, 1)
    server.call("register_blocks", "newer", 2, 4, 512, model_id=0, seed=99)
    client.call(pull_one, 1)
    assert (client.memory("dst")[0][GUARD : GUARD + 512] == server.memory("newer")[0][GUARD : GUARD + 512]).all()


def test_destination_must_be_remote_accessible(peers: Peers) -> None:
    """In remote-accessible mode, on either side."""
    server, client = peers.make(1), peers.make(2, listen=False)
    with_caches(server)
    client.call("register_blocks", "dst", 2, 4, 512, remote_accessible=False)
    assert client.link(server) == OK
    expect(LLMStatusCode.LLM_PARAM_INVALID, lambda: client.call(pull_one, 1))
    server.call("register_blocks", "src", 2, 4, 512, model_id=0, seed=1, remote_accessible=False)
    client.call("register_blocks", "dst", 2, 4, 512)
    expect(LLMStatusCode.LLM_PARAM_INVALID, lambda: client.call(pull_one, 1))


def test_memory_registered_after_linking_is_reachable(peers: Peers) -> None:
    """And what was unregistered is not, however the peer came to know it."""
    for paths in ("process_vm", "tcp"):
        server, client = peers.make(1, paths=paths), peers.make(2, listen=False, paths=paths)
        client.call("register_blocks", "dst", 2, 4, 512)
        assert client.link(server) == OK
        expect(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, lambda client=client: client.call(pull_one, 1))
        server.call("register_blocks", "src", 2, 4, 512, model_id=0, seed=1)
        client.call(pull_one, 1)
        server.call("unregister", "src")
        expect(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, lambda client=client: client.call(pull_one, 1))
        server.call("register_blocks", "src", 2, 4, 512, model_id=0, seed=2)
        client.call(pull_one, 1)
        assert (client.memory("dst")[0][GUARD : GUARD + 512] == server.memory("src")[0][GUARD : GUARD + 512]).all()


def test_mamba_states_have_two_and_three_dimensions(peers: Peers) -> None:
    """Shapes of any rank; dimension 0 counts the blocks."""
    server, client = peers.make(1), peers.make(2, listen=False)
    server.call(register_states, seed=3)
    client.call(register_states, seed=None)
    assert client.link(server) == OK
    client.call(pull_states, 1)
    for name in ("conv", "ssm"):
        assert (client.call(state, name)[1] == server.call(state, name)[2]).all()


def register_states(node: Node, seed: int | None) -> None:
    """In the child: a 3-d and a 2-d state."""
    for model_id, (name, shape) in enumerate({"conv": [4, 3, 8], "ssm": [4, 10]}.items()):
        array = np.zeros(shape, dtype=np.float32)
        if seed is not None:
            array[:] = np.random.default_rng(seed).random(shape)
        desc = CacheDesc(num_tensors=1, shape=shape, data_type=DataType.DT_FLOAT, placement=Placement.DEVICE)
        key = BlocksCacheKey(node.datadist.cluster_id, model_id)
        node.caches[name] = node.manager.register_blocks_cache(desc, [array.ctypes.data], key, remote_accessible=True)
        node.extra[name] = array


def pull_states(node: Node, cluster_id: int) -> None:
    """In the child: with layer ranges, as the connector calls it."""
    for model_id, name in enumerate(("conv", "ssm")):
        node.manager.pull_blocks(
            BlocksCacheKey(cluster_id, model_id),
            node.caches[name],
            src_blocks=[2],
            dst_blocks=[1],
            src_layer_range=range(1),
            dst_layer_range=range(1),
            tensor_num_per_layer=1,
        )


def state(node: Node, name: str) -> np.ndarray:
    """In the child."""
    array: np.ndarray = node.extra[name]
    return array


def test_retry_codes_exist() -> None:
    """A connector names these at import."""
    names = (
        "LLM_REPEAT_REQUEST",
        "LLM_CLUSTER_NUM_EXCEED_LIMIT",
        "LLM_PROCESSING_LINK",
        "LLM_DEVICE_OUT_OF_MEMORY",
        "LLM_TIMEOUT",
        "LLM_WAIT_PROCESS_TIMEOUT",
        "LLM_LINK_BUSY",
    )
    assert all(name in LLMStatusCode.__members__ for name in names)


def test_link_and_relink_while_others_pull(peers: Peers) -> None:
    """Linking one peer does not disturb transfers with another."""
    first, second, client = peers.make(1), peers.make(2), peers.make(3, listen=False)
    with_caches(first, second, client)
    assert client.link(first) == OK
    pulls = client.begin(pull_many, 1, 500)
    for _ in range(10):
        assert client.link(second) == OK
        client.call(pull_one, 2)
        assert client.call("unlink", 2, second.address) == OK
    assert pulls.result(TIMEOUT_S) == 500


def pull_many(node: Node, cluster_id: int, count: int) -> int:
    """In the child."""
    for _ in range(count):
        pull_one(node, cluster_id)
    return count
