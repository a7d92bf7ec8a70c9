"""Status codes, the exception, and the raise helpers."""

from __future__ import annotations

import pickle

import pytest

from expect import PI, expect
from llm_datadist import LLMException, LLMStatusCode, Status, llm_datadist_wrapper
from llm_datadist.status import code_2_status, handle_llm_status, raise_if_false, raise_if_true

# member, number, name of the constant in the native module of the original
CODES = [
    ("LLM_SUCCESS", 0x0, "kSuccess"),
    ("LLM_FAILED", 4294967295, "kFailed"),
    ("LLM_WAIT_PROCESS_TIMEOUT", 1343270913, "kLLMWaitProcessTimeOut"),
    ("LLM_KV_CACHE_NOT_EXIST", 1343270914, "kLLMKVCacheNotExist"),
    ("LLM_REPEAT_REQUEST", 1343270915, "kLLMRepeatRequest"),
    ("LLM_REQUEST_ALREADY_COMPLETED", 1343270916, "kLLMRequestAlreadyCompleted"),
    ("LLM_PARAM_INVALID", 1343270917, "kParamInvalid"),
    ("LLM_ENGINE_FINALIZED", 1343270918, "kLLMEngineFinalized"),
    ("LLM_NOT_YET_LINK", 1343270919, "kLLMNotYetLink"),
    ("LLM_ALREADY_LINK", 1343270920, "kAlreadyLink"),
    ("LLM_LINK_FAILED", 1343270921, "kLinKFailed"),
    ("LLM_UNLINK_FAILED", 1343270922, "kUnlinkFailed"),
    ("LLM_NOTIFY_PROMPT_UNLINK_FAILED", 1343270923, "kNotifyPromptUnlinkFailed"),
    ("LLM_CLUSTER_NUM_EXCEED_LIMIT", 1343270924, "kLLMClusterNumExceedLimit"),
    ("LLM_PROCESSING_LINK", 1343270925, "kProcessingLink"),
    ("LLM_DEVICE_OUT_OF_MEMORY", 1343270926, "kDeviceOutOfMemory"),
    ("LLM_PREFIX_ALREADY_EXIST", 1343270927, "kPrefixAlreadyExist"),
    ("LLM_PREFIX_NOT_EXIST", 1343270928, "kPrefixNotExist"),
    ("LLM_SEQ_LENOVERLIMIT", 1343270929, "kLLMSeqLenOverLimit"),
    ("LLM_NO_FREE_BLOCK", 1343270930, "kLLMNoFreeBlock"),
    ("LLM_BLOCKS_OUT_OF_MEMORY", 1343270931, "kLLMBlocksOutOfMemory"),
    ("LLM_EXIST_LINK", 1343270936, "kLLMExistLink"),
    ("LLM_FEATURE_NOT_ENABLED", 1343270937, "kLLMFeatureNotEnabled"),
    ("LLM_TIMEOUT", 1343270938, "kLLMTimeout"),
    ("LLM_LINK_BUSY", 1343270939, "kLLMLinkBusy"),
    ("LLM_OUT_OF_MEMORY", 1343270940, "kLLMOutOfMemory"),
    ("LLM_DEVICE_MEM_ERROR", 507053, "kLLMDeviceMemError"),
    ("LLM_SUSPECT_REMOTE_ERROR", 507057, "kLLMSuspectRemoteError"),
]


@pytest.mark.parametrize(("name", "number", "constant"), CODES)
def test_codes_are_the_originals(name: str, number: int, constant: str) -> None:
    member = LLMStatusCode[name]
    assert member == number
    assert getattr(llm_datadist_wrapper, constant) == number
    assert type(getattr(llm_datadist_wrapper, constant)) is int
    assert str(member) == f"{member}" == f"LLMStatusCode.{name}"
    assert code_2_status(number) is member


def test_every_member_is_tabled() -> None:
    assert {name for name, _, _ in CODES} | {"LLM_UNKNOWN_ERROR"} == set(LLMStatusCode.__members__)
    assert len(LLMStatusCode) == len(CODES) + 1
    assert LLMStatusCode.LLM_UNKNOWN_ERROR == -1


@pytest.mark.parametrize("code", [-1, 7, 2**64, 0x5010B014])
def test_unknown_codes_are_failed(code: int) -> None:
    assert code_2_status(code) is LLMStatusCode.LLM_FAILED


def test_exception_defaults_to_success_and_takes_the_code_by_keyword_only() -> None:
    error = LLMException("text", PI)
    assert isinstance(error, RuntimeError)
    assert error.args == ("text", PI)
    assert error.status_code is LLMStatusCode.LLM_SUCCESS
    with pytest.raises(AttributeError):
        error.status_code = PI  # type: ignore[misc]


def test_exception_survives_pickling() -> None:
    error = LLMException(
        "text", 5, status_code=PI, peer=7, operation="pull_cache", bytes_done=0, retryable=True, hint="h"
    )
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is LLMException
    assert copy.args == ("text", 5)
    assert copy.status_code is PI
    assert (copy.peer, copy.operation, copy.bytes_done, copy.retryable, copy.hint) == (7, "pull_cache", 0, True, "h")


def test_status_object() -> None:
    assert Status(LLMStatusCode.LLM_SUCCESS).is_ok()
    assert not Status(PI).is_ok()
    assert Status(PI).status_code is PI


def test_handle_llm_status_has_the_originals_text() -> None:
    handle_llm_status(0, "f", "c")
    expect(
        LLMStatusCode.LLM_TIMEOUT,
        lambda: handle_llm_status(LLMStatusCode.LLM_TIMEOUT, "pull_cache", "cache_id is 1"),
        match=r"^\[pull_cache\] failed, error code is LLMStatusCode.LLM_TIMEOUT, cache_id is 1\.$",
    )
    expect(LLMStatusCode.LLM_FAILED, lambda: handle_llm_status(12345, "f", "c"))


def test_raise_if_formats_logs_and_raises(capsys: pytest.CaptureFixture[str]) -> None:
    raise_if_false(True, "{} {missing}", 1)
    raise_if_true(0, "{} {missing}", 1)
    expect(PI, lambda: raise_if_false([], "{} is {what}", "list", what="empty"), match="^list is empty$")
    expect(
        LLMStatusCode.LLM_FAILED,
        lambda: raise_if_true(1, "no", status_code=LLMStatusCode.LLM_FAILED),
        match="^no$",
    )
    out = capsys.readouterr().out
    assert out.count("[ERROR] LLM_DATADIST(") == 2
    assert "list is empty" in out
