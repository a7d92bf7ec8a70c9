"""What can be imported from where, and what an import does not do."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib import resources

import pytest

import llm_datadist
from expect import expect

NAMES = [
    "LLMClusterInfo",
    "LLMStatusCode",
    "LLMException",
    "LLMRole",
    "LlmConfig",
    "LLMConfig",
    "DataType",
    "Status",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "KvCache",
    "Cache",
    "BlocksCacheKey",
    "LLMDataDist",
    "Placement",
    "RegisterMemStatus",
    "LayerSynchronizer",
    "TransferConfig",
    "CacheTask",
    "TransferWithCacheKeyConfig",
    "Memtype",
    "MemInfo",
    "Notification",
    "TransferTask",
]

PATHS = {
    "llm_datadist.status": (
        "LLMStatusCode LLMException Status code_2_status handle_llm_status raise_if_false raise_if_true"
    ),
    "llm_datadist.configs": "LLMRole LLMClusterInfo LlmConfig trans_str_ip",
    "llm_datadist.data_type": (
        "DataType python_dtype_2_dwrapper_dtype get_python_dtype_from_wrapper_dtype dtype_to_np_dtype valid_np_dtypes "
        "np_dtype_to_dtype"
    ),
    "llm_datadist.v2.llm_types": (
        "CacheDesc Cache KvCache CacheKey BlocksCacheKey CacheKeyByIdAndIndex MemInfo TransferConfig "
        "TransferWithCacheKeyConfig LayerSynchronizer CacheTask RegisterMemStatus Memtype Placement PushType "
        "check_layer_range int_to_mem_status_dict"
    ),
    "llm_datadist.v2.llm_datadist": "LLMDataDist _shutdown_handler EngineConfig",
    "llm_datadist.v2.cache_manager": "CacheManager",
    "llm_datadist.v2.llm_utils": "layer_range_to_tensor_indices parse_listen_ip_info is_invalid_id is_valid_id",
    "llm_datadist.v2.config": "EngineConfig ClusterConfig",
    "llm_datadist.utils.utils": (
        "check_isinstance check_dict check_uint8 check_uint16 check_uint32 check_uint64 check_int32 check_int64 "
        "check_list_int32 check_list_int64 check_list_uint64 check_positive_or_set_default"
    ),
    "llm_datadist.utils.log": "get_logger info warn error LOG_FORMAT",
    "llm_datadist.llm_datadist_wrapper": "kSuccess",
    "llm_datadist.metadef_wrapper": "DT_FLOAT DT_BF16",
}


def python(code: str) -> str:
    """Standard output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.parametrize("path", PATHS)
def test_module_paths(path: str) -> None:
    module = importlib.import_module(path)
    for name in PATHS[path].split():
        assert getattr(module, name) is not None


def test_both_paths_give_the_same_objects() -> None:
    types = importlib.import_module("llm_datadist.v2.llm_types")
    for name in ("Cache", "CacheDesc", "BlocksCacheKey", "CacheTask", "Placement"):
        assert getattr(types, name) is getattr(llm_datadist, name)
    assert importlib.import_module("llm_datadist.v2.llm_datadist").LLMDataDist is llm_datadist.LLMDataDist


def test_v2_list_and_all() -> None:
    assert isinstance(llm_datadist.v2_list, list)
    assert sorted(llm_datadist.v2_list) == sorted(NAMES) == sorted(llm_datadist.__all__)
    assert len(set(llm_datadist.v2_list)) == 25
    for name in llm_datadist.v2_list:
        assert isinstance(getattr(llm_datadist, name), type)
        assert getattr(llm_datadist, name).__doc__
    assert not hasattr(llm_datadist, "CacheManager")


def test_star_import() -> None:
    code = "from llm_datadist import *\nprint(sorted(n for n in dir() if not n.startswith('__')))"
    assert python(code) == str(sorted(NAMES))


@pytest.mark.parametrize("name", ["Tensor", "TensorDesc", "KvCacheManager"])
def test_classes_of_the_older_mode_need_their_own_package(name: str) -> None:
    expect(ModuleNotFoundError, lambda: getattr(llm_datadist, name), match="llm_datadist_v1")
    with pytest.raises(ImportError):
        exec(f"from llm_datadist import {name}")


def test_unknown_attribute() -> None:
    expect(AttributeError, lambda: llm_datadist.no_such_name, match="has no attribute")  # type: ignore[attr-defined]
    assert not hasattr(llm_datadist, "no_such_name")


def test_submodules_are_attributes_after_a_plain_import() -> None:
    code = (
        "import llm_datadist as l\n"
        "for n in 'status configs data_type utils v2 llm_datadist_wrapper metadef_wrapper'.split(): getattr(l, n)\n"
        "print(l.utils.utils.__name__, l.utils.log.__name__, l.v2.llm_types.__name__)"
    )
    assert python(code) == "llm_datadist.utils.utils llm_datadist.utils.log llm_datadist.v2.llm_types"


def test_import_loads_nothing_heavy_and_does_no_work() -> None:
    code = (
        "import atexit, logging, os, sys, threading\n"
        "before = dict(os.environ)\n"
        "registered = []\n"
        "atexit.register = lambda *a, **k: registered.append(a)\n"
        "import llm_datadist, llm_datadist.v2.cache_manager, llm_datadist.utils.log\n"
        "heavy = {'numpy', 'torch', 'rich', 'typer', 'msgspec'} & set(sys.modules)\n"
        "print(heavy, dict(os.environ) == before, registered, threading.active_count())"
    )
    assert python(code) == "set() True [] 1"


def test_numpy_comes_with_the_first_lazy_table() -> None:
    code = (
        "import sys, llm_datadist\nfrom llm_datadist.configs import LLMConfig\nLLMConfig().generate_options()\n"
        "before = 'numpy' in sys.modules\nllm_datadist.data_type.valid_np_dtypes\nprint(before, 'numpy' in sys.modules)"
    )
    assert python(code) == "False True"


def test_version_and_typing_marker() -> None:
    assert llm_datadist.__version__.count(".") == 2
    assert resources.files(llm_datadist).joinpath("py.typed").is_file()
