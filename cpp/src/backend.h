/**
 * @file backend.h
 * @brief What libllm_datadist.so asks of the plugin that drives the engine.
 */
#ifndef LLM_DATADIST_SRC_BACKEND_H_
#define LLM_DATADIST_SRC_BACKEND_H_

#include <map>
#include <vector>

#include "llm_datadist/llm_datadist.h"

namespace llm_datadist {
/** One engine. Calls as in LlmDataDist; none throws. */
class Backend {
 public:
  Backend() = default;
  Backend(const Backend &) = delete;
  Backend &operator=(const Backend &) = delete;
  virtual ~Backend() = default;

  virtual Status Initialize(const std::map<AscendString, AscendString> &options) noexcept = 0;
  virtual void Finalize() noexcept = 0;
  virtual Status SetRole(LlmRole role, const std::map<AscendString, AscendString> &options) noexcept = 0;
  virtual Status Link(const std::vector<ClusterInfo> &clusters, std::vector<Status> &rets,
                      int32_t timeout_ms) noexcept = 0;
  virtual Status Unlink(const std::vector<ClusterInfo> &clusters, std::vector<Status> &rets, int32_t timeout_ms,
                        bool force) noexcept = 0;
  virtual Status Allocate(const CacheDesc &desc, Cache &cache) noexcept = 0;
  virtual Status Deallocate(int64_t cache_id) noexcept = 0;
  virtual Status PullCache(const CacheIndex &source, int64_t cache_id, uint32_t batch_index, int64_t size,
                           const KvCacheExtParam &ext_param) noexcept = 0;
  virtual Status PullBlocks(const CacheIndex &source, int64_t cache_id, const std::vector<uint64_t> &src_blocks,
                            const std::vector<uint64_t> &dst_blocks, const KvCacheExtParam &ext_param) noexcept = 0;
  virtual Status PushCache(int64_t cache_id, const CacheIndex &target, uint32_t batch_index, int64_t size,
                           const KvCacheExtParam &ext_param) noexcept = 0;
  virtual Status PushBlocks(int64_t cache_id, const CacheIndex &target, const std::vector<uint64_t> &src_blocks,
                            const std::vector<uint64_t> &dst_blocks, const KvCacheExtParam &ext_param) noexcept = 0;
  virtual Status CopyCache(int64_t src_id, int64_t dst_id, uint32_t src_batch, uint32_t dst_batch, uint64_t offset,
                           int64_t size) noexcept = 0;
  virtual Status CopyBlocks(int64_t src_id, int64_t dst_id, const std::vector<uint64_t> &src_blocks,
                            const std::vector<std::vector<uint64_t>> &dst_blocks_list) noexcept = 0;
  virtual Status Register(const CacheDesc &desc, const std::vector<uint64_t> &addrs, int64_t &cache_id) noexcept = 0;
  virtual Status Unregister(int64_t cache_id) noexcept = 0;
};

/** What the plugin exports; changes with every change of Backend. */
constexpr const char kCreateBackend[] = "LlmDatadistCreateBackend1";
/** A backend that the caller deletes; nullptr, and a line on standard error, if Python or the package is not there. */
using CreateBackend = Backend *(*)(uint64_t cluster_id, int32_t role);
}  // namespace llm_datadist

#endif  // LLM_DATADIST_SRC_BACKEND_H_
