/**
 * @file ge_api_error_codes.h
 * @brief Older name of api_error_codes.h.
 */
#ifndef LLM_DATADIST_EXTERNAL_GE_COMMON_GE_API_ERROR_CODES_H_
#define LLM_DATADIST_EXTERNAL_GE_COMMON_GE_API_ERROR_CODES_H_

#include "external/ge_common/api_error_codes.h"

#endif  // LLM_DATADIST_EXTERNAL_GE_COMMON_GE_API_ERROR_CODES_H_
