/**
 * @file llm_error_codes.h
 * @brief All status codes of LLM-DataDist in namespace ge, and a description of each.
 */
#ifndef LLM_DATADIST_LLM_ERROR_CODES_H_
#define LLM_DATADIST_LLM_ERROR_CODES_H_

#include "external/ge_common/api_error_codes.h"

namespace ge {
/** Waiting for the peer took too long. */
constexpr Status LLM_WAIT_PROC_TIMEOUT = 0x5010B001U;
/** There is no such cache, here or at the peer. */
constexpr Status LLM_KV_CACHE_NOT_EXIST = 0x5010B002U;
/** The request exists already. */
constexpr Status LLM_REPEAT_REQUEST = 0x5010B003U;
/** The request has been completed. */
constexpr Status LLM_REQUEST_ALREADY_COMPLETED = 0x5010B004U;
/** An argument is wrong. */
constexpr Status LLM_PARAM_INVALID = 0x5010B005U;
/** The engine has been finalized. */
constexpr Status LLM_ENGINE_FINALIZED = 0x5010B006U;
/** The cluster is not linked. */
constexpr Status LLM_NOT_YET_LINK = 0x5010B007U;
/** The cluster is linked already. */
constexpr Status LLM_ALREADY_LINK = 0x5010B008U;
/** The cluster cannot be linked. */
constexpr Status LLM_LINK_FAILED = 0x5010B009U;
/** The peer cannot be told of the unlink. */
constexpr Status LLM_UNLINK_FAILED = 0x5010B00AU;
/** The prompt side cannot be told of the unlink. */
constexpr Status LLM_NOTIFY_PROMPT_UNLINK_FAILED = 0x5010B00BU;
/** Too many clusters. */
constexpr Status LLM_CLUSTER_NUM_EXCEED_LIMIT = 0x5010B00CU;
/** The link is being made. */
constexpr Status LLM_PROCESSING_LINK = 0x5010B00DU;
/** No device memory is left. */
constexpr Status LLM_DEVICE_OUT_OF_MEMORY = 0x5010B00EU;
/** The prefix exists already. */
constexpr Status LLM_PREFIX_ALREADY_EXIST = 0x5010B00FU;
/** There is no such prefix. */
constexpr Status LLM_PREFIX_NOT_EXIST = 0x5010B010U;
/** The sequence is too long. */
constexpr Status LLM_SEQ_LEN_OVER_LIMIT = 0x5010B011U;
/** No block is free. */
constexpr Status LLM_NO_FREE_BLOCK = 0x5010B012U;
/** No memory is left for blocks. */
constexpr Status LLM_BLOCKS_OUT_OF_MEMORY = 0x5010B013U;
/** The caches do not fit each other. */
constexpr Status LLM_CACHE_INCOMPATIBLE = 0x5010B014U;
/** The cache key exists already. */
constexpr Status LLM_CACHE_KEY_ALREADY_EXIST = 0x5010B015U;
/** Copying a cache failed. */
constexpr Status LLM_COPY_CACHE_FAILED = 0x5010B016U;
/** The cache id exists already. */
constexpr Status LLM_CACHE_ID_ALREADY_EXIST = 0x5010B017U;
/** There are links. */
constexpr Status LLM_EXIST_LINK = 0x5010B018U;
/** The feature is not enabled. */
constexpr Status LLM_FEATURE_NOT_ENABLED = 0x5010B019U;
/** It took too long. */
constexpr Status LLM_TIMEOUT = 0x5010B01AU;
/** The memory or the link is in use. */
constexpr Status LLM_LINK_BUSY = 0x5010B01BU;
/** The memory pool is exhausted. */
constexpr Status LLM_OUT_OF_MEMORY = 0x5010B01CU;

/**
 * @brief What a status means, in a few words of English.
 * @param [in] status any number
 * @return a text that is never freed; "unknown status" for a number that no call returns
 * @note May be called from any thread.
 */
ASCEND_FUNC_VISIBILITY const char *LlmStatusDescription(Status status);
}  // namespace ge

#endif  // LLM_DATADIST_LLM_ERROR_CODES_H_
