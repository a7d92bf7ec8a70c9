#include "llm_datadist/llm_error_codes.h"

namespace ge {
const char *LlmStatusDescription(Status status) {
  switch (status) {
    case SUCCESS:
      return "success";
    case FAILED:
      return "failure, or not initialized; the log says why";
    case LLM_WAIT_PROC_TIMEOUT:
      return "waiting for the peer took too long";
    case LLM_KV_CACHE_NOT_EXIST:
      return "there is no such cache, here or at the peer";
    case LLM_REPEAT_REQUEST:
      return "the request exists already";
    case LLM_REQUEST_ALREADY_COMPLETED:
      return "the request has been completed";
    case LLM_PARAM_INVALID:
      return "an argument is wrong";
    case LLM_ENGINE_FINALIZED:
      return "the engine has been finalized";
    case LLM_NOT_YET_LINK:
      return "the cluster is not linked";
    case LLM_ALREADY_LINK:
      return "the cluster is linked already";
    case LLM_LINK_FAILED:
      return "the cluster cannot be linked";
    case LLM_UNLINK_FAILED:
      return "the peer cannot be told of the unlink";
    case LLM_NOTIFY_PROMPT_UNLINK_FAILED:
      return "the prompt side cannot be told of the unlink";
    case LLM_CLUSTER_NUM_EXCEED_LIMIT:
      return "too many clusters";
    case LLM_PROCESSING_LINK:
      return "the link is being made";
    case LLM_DEVICE_OUT_OF_MEMORY:
      return "no device memory is left";
    case LLM_PREFIX_ALREADY_EXIST:
      return "the prefix exists already";
    case LLM_PREFIX_NOT_EXIST:
      return "there is no such prefix";
    case LLM_SEQ_LEN_OVER_LIMIT:
      return "the sequence is too long";
    case LLM_NO_FREE_BLOCK:
      return "no block is free";
    case LLM_BLOCKS_OUT_OF_MEMORY:
      return "no memory is left for blocks";
    case LLM_CACHE_INCOMPATIBLE:
      return "the caches do not fit each other";
    case LLM_CACHE_KEY_ALREADY_EXIST:
      return "the cache key exists already";
    case LLM_COPY_CACHE_FAILED:
      return "copying a cache failed";
    case LLM_CACHE_ID_ALREADY_EXIST:
      return "the cache id exists already";
    case LLM_EXIST_LINK:
      return "there are links";
    case LLM_FEATURE_NOT_ENABLED:
      return "the feature is not enabled";
    case LLM_TIMEOUT:
      return "it took too long";
    case LLM_LINK_BUSY:
      return "the memory or the link is in use";
    case LLM_OUT_OF_MEMORY:
      return "the memory pool is exhausted";
    default:
      return "unknown status";
  }
}
}  // namespace ge
