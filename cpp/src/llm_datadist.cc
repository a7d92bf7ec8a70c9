#include "llm_datadist/llm_datadist.h"

#include <atomic>
#include <mutex>
#include <new>

#include "loader.h"

namespace llm_datadist {
/** The backend, made by the first Initialize. */
class LlmDataDist::LlmDataDistImpl {
 public:
  LlmDataDistImpl(uint64_t cluster_id, LlmRole role) : cluster_id_(cluster_id), role_(role) {}

  Status Initialize(const std::map<AscendString, AscendString> &options) {
    if (role_ < LlmRole::kPrompt || role_ >= LlmRole::kEnd) {
      return LLM_PARAM_INVALID;
    }
    if (Get() == nullptr) {
      Keep(MakeBackend(cluster_id_, role_));
    }
    Backend *const backend = Get();
    return backend == nullptr ? LLM_FAILED : backend->Initialize(options);
  }

  /** nullptr before the first Initialize. */
  Backend *Get() const { return backend_.load(std::memory_order_acquire); }

 private:
  /** Of several threads that made one, the first wins. Python must not be entered under the mutex. */
  void Keep(std::unique_ptr<Backend> made) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (owner_ == nullptr) {
      owner_.swap(made);
      backend_.store(owner_.get(), std::memory_order_release);
    }
  }

  const uint64_t cluster_id_;
  const LlmRole role_;
  std::mutex mutex_;
  std::unique_ptr<Backend> owner_;
  std::atomic<Backend *> backend_{nullptr};
};

namespace {
/** Calls a backend; the status that stands for "not initialized" if there is none. */
template <typename Impl, typename Call>
Status With(const Impl &impl, Status missing, Call call) {
  Backend *const backend = impl == nullptr ? nullptr : impl->Get();
  return backend == nullptr ? missing : call(*backend);
}
}  // namespace

LlmDataDist::LlmDataDist(uint64_t cluster_id, LlmRole role)
    : impl_(new (std::nothrow) LlmDataDistImpl(cluster_id, role)) {}

LlmDataDist::~LlmDataDist() = default;

Status LlmDataDist::Initialize(const std::map<AscendString, AscendString> &options) {
  return impl_ == nullptr ? LLM_FAILED : impl_->Initialize(options);
}

void LlmDataDist::Finalize() {
  (void)With(impl_, LLM_SUCCESS, [](Backend &backend) {
    backend.Finalize();
    return LLM_SUCCESS;
  });
}

Status LlmDataDist::SetRole(LlmRole role, const std::map<AscendString, AscendString> &options) {
  return With(impl_, LLM_FAILED, [&](Backend &backend) { return backend.SetRole(role, options); });
}

Status LlmDataDist::LinkLlmClusters(const std::vector<ClusterInfo> &clusters, std::vector<Status> &rets,
                                    int32_t timeout_in_millis) {
  return With(impl_, LLM_FAILED, [&](Backend &backend) { return backend.Link(clusters, rets, timeout_in_millis); });
}

Status LlmDataDist::UnlinkLlmClusters(const std::vector<ClusterInfo> &clusters, std::vector<Status> &rets,
                                      int32_t timeout_in_millis, bool force_flag) {
  return With(impl_, LLM_FAILED,
              [&](Backend &backend) { return backend.Unlink(clusters, rets, timeout_in_millis, force_flag); });
}

Status LlmDataDist::AllocateCache(const CacheDesc &cache_desc, Cache &cache) {
  return With(impl_, LLM_FEATURE_NOT_ENABLED, [&](Backend &backend) { return backend.Allocate(cache_desc, cache); });
}

Status LlmDataDist::DeallocateCache(int64_t cache_id) {
  return With(impl_, LLM_FEATURE_NOT_ENABLED, [&](Backend &backend) { return backend.Deallocate(cache_id); });
}

Status LlmDataDist::PullKvCache(const CacheIndex &src_cache_index, const Cache &dst_cache, uint32_t batch_index,
                                int64_t size, const KvCacheExtParam &ext_param) {
  return With(impl_, LLM_FAILED, [&](Backend &backend) {
    return backend.PullCache(src_cache_index, dst_cache.cache_id, batch_index, size, ext_param);
  });
}

Status LlmDataDist::PullKvBlocks(const CacheIndex &src_cache_index, const Cache &dst_cache,
                                 const std::vector<uint64_t> &src_blocks, const std::vector<uint64_t> &dst_blocks,
                                 const KvCacheExtParam &ext_param) {
  return With(impl_, LLM_FAILED, [&](Backend &backend) {
    return backend.PullBlocks(src_cache_index, dst_cache.cache_id, src_blocks, dst_blocks, ext_param);
  });
}

Status LlmDataDist::CopyKvCache(const Cache &src_cache, const Cache &dst_cache, uint32_t src_batch_index,
                                uint32_t dst_batch_index, uint64_t offset, int64_t size) {
  return With(impl_, LLM_FEATURE_NOT_ENABLED, [&](Backend &backend) {
    return backend.CopyCache(src_cache.cache_id, dst_cache.cache_id, src_batch_index, dst_batch_index, offset, size);
  });
}

Status LlmDataDist::CopyKvBlocks(const Cache &src_cache, const Cache &dst_cache,
                                 const std::vector<uint64_t> &src_blocks,
                                 const std::vector<std::vector<uint64_t>> &dst_blocks_list) {
  return With(impl_, LLM_FEATURE_NOT_ENABLED, [&](Backend &backend) {
    return backend.CopyBlocks(src_cache.cache_id, dst_cache.cache_id, src_blocks, dst_blocks_list);
  });
}

Status LlmDataDist::PushKvCache(const Cache &src_cache, const CacheIndex &dst_cache_index, uint32_t src_batch_index,
                                int64_t size, const KvCacheExtParam &ext_param) {
  return With(impl_, LLM_FAILED, [&](Backend &backend) {
    return backend.PushCache(src_cache.cache_id, dst_cache_index, src_batch_index, size, ext_param);
  });
}

Status LlmDataDist::PushKvBlocks(const Cache &src_cache, const CacheIndex &dst_cache_index,
                                 const std::vector<uint64_t> &src_blocks, const std::vector<uint64_t> &dst_blocks,
                                 const KvCacheExtParam &ext_param) {
  return With(impl_, LLM_FAILED, [&](Backend &backend) {
    return backend.PushBlocks(src_cache.cache_id, dst_cache_index, src_blocks, dst_blocks, ext_param);
  });
}

Status LlmDataDist::RegisterKvCache(const CacheDesc &cache_desc, const std::vector<uint64_t> &addrs,
                                    const RegisterCfg &, int64_t &cache_id) {
  return With(impl_, LLM_FAILED, [&](Backend &backend) { return backend.Register(cache_desc, addrs, cache_id); });
}

Status LlmDataDist::UnregisterKvCache(int64_t cache_id) {
  return With(impl_, LLM_FAILED, [&](Backend &backend) { return backend.Unregister(cache_id); });
}
}  // namespace llm_datadist
