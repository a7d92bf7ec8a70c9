/**
 * @file loader.h
 * @brief Finds a Python runtime and the plugin.
 */
#ifndef LLM_DATADIST_SRC_LOADER_H_
#define LLM_DATADIST_SRC_LOADER_H_

#include <memory>

#include "backend.h"

namespace llm_datadist {
/**
 * @brief A new backend.
 *
 * The first call loads the plugin and, if the process has no Python runtime yet, libpython; a failure is told on
 * standard error, and tried again by the next call. Thread-safe.
 * @return nullptr on failure
 */
std::unique_ptr<Backend> MakeBackend(uint64_t cluster_id, LlmRole role) noexcept;
}  // namespace llm_datadist

#endif  // LLM_DATADIST_SRC_LOADER_H_
