"""The status numbers under the names of the original's native module (``kLinKFailed`` is spelled as there)."""

from __future__ import annotations

from llm_datadist.status import LLMStatusCode

kSuccess: int = int(LLMStatusCode.LLM_SUCCESS)  # noqa: N816 - these and all below are the original's names
kFailed: int = int(LLMStatusCode.LLM_FAILED)  # noqa: N816
kLLMWaitProcessTimeOut: int = int(LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT)  # noqa: N816
kLLMKVCacheNotExist: int = int(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)  # noqa: N816
kLLMRepeatRequest: int = int(LLMStatusCode.LLM_REPEAT_REQUEST)  # noqa: N816
kLLMRequestAlreadyCompleted: int = int(LLMStatusCode.LLM_REQUEST_ALREADY_COMPLETED)  # noqa: N816
kParamInvalid: int = int(LLMStatusCode.LLM_PARAM_INVALID)  # noqa: N816
kLLMEngineFinalized: int = int(LLMStatusCode.LLM_ENGINE_FINALIZED)  # noqa: N816
kLLMNotYetLink: int = int(LLMStatusCode.LLM_NOT_YET_LINK)  # noqa: N816
kAlreadyLink: int = int(LLMStatusCode.LLM_ALREADY_LINK)  # noqa: N816
kLinKFailed: int = int(LLMStatusCode.LLM_LINK_FAILED)  # noqa: N816
kUnlinkFailed: int = int(LLMStatusCode.LLM_UNLINK_FAILED)  # noqa: N816
kNotifyPromptUnlinkFailed: int = int(LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED)  # noqa: N816
kLLMClusterNumExceedLimit: int = int(LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT)  # noqa: N816
kProcessingLink: int = int(LLMStatusCode.LLM_PROCESSING_LINK)  # noqa: N816
kDeviceOutOfMemory: int = int(LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY)  # noqa: N816
kPrefixAlreadyExist: int = int(LLMStatusCode.LLM_PREFIX_ALREADY_EXIST)  # noqa: N816
kPrefixNotExist: int = int(LLMStatusCode.LLM_PREFIX_NOT_EXIST)  # noqa: N816
kLLMSeqLenOverLimit: int = int(LLMStatusCode.LLM_SEQ_LENOVERLIMIT)  # noqa: N816
kLLMNoFreeBlock: int = int(LLMStatusCode.LLM_NO_FREE_BLOCK)  # noqa: N816
kLLMBlocksOutOfMemory: int = int(LLMStatusCode.LLM_BLOCKS_OUT_OF_MEMORY)  # noqa: N816
kLLMExistLink: int = int(LLMStatusCode.LLM_EXIST_LINK)  # noqa: N816
kLLMFeatureNotEnabled: int = int(LLMStatusCode.LLM_FEATURE_NOT_ENABLED)  # noqa: N816
kLLMTimeout: int = int(LLMStatusCode.LLM_TIMEOUT)  # noqa: N816
kLLMLinkBusy: int = int(LLMStatusCode.LLM_LINK_BUSY)  # noqa: N816
kLLMOutOfMemory: int = int(LLMStatusCode.LLM_OUT_OF_MEMORY)  # noqa: N816
kLLMDeviceMemError: int = int(LLMStatusCode.LLM_DEVICE_MEM_ERROR)  # noqa: N816
kLLMSuspectRemoteError: int = int(LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR)  # noqa: N816
