"""The status numbers under the names of the original's native module (``kLinKFailed`` is spelled as there)."""

from __future__ import annotations

from llm_datadist.status import LLMStatusCode

kSuccess = int(LLMStatusCode.LLM_SUCCESS)  # noqa: N816 - these and all below are the original's names
kFailed = int(LLMStatusCode.LLM_FAILED)  # noqa: N816
kLLMWaitProcessTimeOut = int(LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT)  # noqa: N816
kLLMKVCacheNotExist = int(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)  # noqa: N816
kLLMRepeatRequest = int(LLMStatusCode.LLM_REPEAT_REQUEST)  # noqa: N816
kLLMRequestAlreadyCompleted = int(LLMStatusCode.LLM_REQUEST_ALREADY_COMPLETED)  # noqa: N816
kParamInvalid = int(LLMStatusCode.LLM_PARAM_INVALID)  # noqa: N816
kLLMEngineFinalized = int(LLMStatusCode.LLM_ENGINE_FINALIZED)  # noqa: N816
kLLMNotYetLink = int(LLMStatusCode.LLM_NOT_YET_LINK)  # noqa: N816
kAlreadyLink = int(LLMStatusCode.LLM_ALREADY_LINK)  # noqa: N816
kLinKFailed = int(LLMStatusCode.LLM_LINK_FAILED)  # noqa: N816
kUnlinkFailed = int(LLMStatusCode.LLM_UNLINK_FAILED)  # noqa: N816
kNotifyPromptUnlinkFailed = int(LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED)  # noqa: N816
kLLMClusterNumExceedLimit = int(LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT)  # noqa: N816
kProcessingLink = int(LLMStatusCode.LLM_PROCESSING_LINK)  # noqa: N816
kDeviceOutOfMemory = int(LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY)  # noqa: N816
kPrefixAlreadyExist = int(LLMStatusCode.LLM_PREFIX_ALREADY_EXIST)  # noqa: N816
kPrefixNotExist = int(LLMStatusCode.LLM_PREFIX_NOT_EXIST)  # noqa: N816
kLLMSeqLenOverLimit = int(LLMStatusCode.LLM_SEQ_LENOVERLIMIT)  # noqa: N816
kLLMNoFreeBlock = int(LLMStatusCode.LLM_NO_FREE_BLOCK)  # noqa: N816
kLLMBlocksOutOfMemory = int(LLMStatusCode.LLM_BLOCKS_OUT_OF_MEMORY)  # noqa: N816
kLLMExistLink = int(LLMStatusCode.LLM_EXIST_LINK)  # noqa: N816
kLLMFeatureNotEnabled = int(LLMStatusCode.LLM_FEATURE_NOT_ENABLED)  # noqa: N816
kLLMTimeout = int(LLMStatusCode.LLM_TIMEOUT)  # noqa: N816
kLLMLinkBusy = int(LLMStatusCode.LLM_LINK_BUSY)  # noqa: N816
kLLMOutOfMemory = int(LLMStatusCode.LLM_OUT_OF_MEMORY)  # noqa: N816
kLLMDeviceMemError = int(LLMStatusCode.LLM_DEVICE_MEM_ERROR)  # noqa: N816
kLLMSuspectRemoteError = int(LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR)  # noqa: N816
