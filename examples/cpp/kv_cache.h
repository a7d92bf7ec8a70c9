/**
 * @file kv_cache.h
 * @brief The KV cache of the examples: 4 layers of K and V, 8 blocks of 16 int32, and its registration.
 */
#ifndef LLM_DATADIST_EXAMPLES_CPP_KV_CACHE_H_
#define LLM_DATADIST_EXAMPLES_CPP_KV_CACHE_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "acl/acl.h"
#include "llm_datadist/llm_datadist.h"

namespace example {
constexpr int32_t kLayers = 4;
constexpr size_t kTensors = 2U * kLayers;
constexpr int64_t kBlocks = 8;
constexpr int64_t kWidth = 16;
constexpr size_t kElements = static_cast<size_t>(kBlocks * kWidth);
constexpr size_t kBytes = kElements * sizeof(int32_t);

/** What prefill computes. */
inline int32_t Value(size_t tensor, size_t element) { return static_cast<int32_t>(tensor * 1000U + element); }

inline void Check(bool good, const std::string &what, uint32_t status = 0U) {
  if (!good) {
    const char *const message = aclGetRecentErrMsg();
    (void)std::fprintf(stderr, "%s failed: 0x%08x %s\n", what.c_str(), status, message == nullptr ? "" : message);
    std::exit(1);
  }
}

inline void Check(llm_datadist::Status status, const std::string &what) {
  Check(status == llm_datadist::LLM_SUCCESS, what, status);
}

/** Memory of a cache; freed at the end. */
class KvCache {
 public:
  KvCache() {
    for (size_t i = 0U; i < kTensors; ++i) {
      void *tensor = nullptr;
      Check(aclrtMalloc(&tensor, kBytes, ACL_MEM_MALLOC_HUGE_ONLY) == ACL_ERROR_NONE, "aclrtMalloc");
      addrs_.push_back(reinterpret_cast<uint64_t>(tensor));
      Write(i, std::vector<int32_t>(kElements, -1));
    }
  }
  ~KvCache() {
    for (const uint64_t addr : addrs_) {
      (void)aclrtFree(reinterpret_cast<void *>(addr));
    }
  }
  KvCache(const KvCache &) = delete;
  KvCache &operator=(const KvCache &) = delete;

  void Write(size_t tensor, const std::vector<int32_t> &values) {
    const auto copied =
        aclrtMemcpy(reinterpret_cast<void *>(addrs_[tensor]), kBytes, values.data(), kBytes, ACL_MEMCPY_HOST_TO_DEVICE);
    Check(copied == ACL_ERROR_NONE, "aclrtMemcpy");
  }

  std::vector<int32_t> Read(size_t tensor) const {
    std::vector<int32_t> values(kElements);
    const void *const source = reinterpret_cast<void *>(addrs_[tensor]);
    Check(aclrtMemcpy(values.data(), kBytes, source, kBytes, ACL_MEMCPY_DEVICE_TO_HOST) == ACL_ERROR_NONE, "aclrtMemcpy");
    return values;
  }

  llm_datadist::Cache Register(llm_datadist::LlmDataDist &datadist) const {
    llm_datadist::CacheDesc desc;
    desc.num_tensors = kTensors;
    desc.data_type = llm_datadist::DT_INT32;
    desc.shape = {kBlocks, kWidth};
    llm_datadist::Cache cache;
    Check(datadist.RegisterKvCache(desc, addrs_, {}, cache.cache_id), "RegisterKvCache");
    return cache;
  }

 private:
  std::vector<uint64_t> addrs_;
};

/** Links to a peer on this machine. */
inline std::vector<llm_datadist::ClusterInfo> Peer(uint64_t cluster_id, const char *port) {
  const auto number = static_cast<uint16_t>(std::strtoul(port, nullptr, 10));
  return {llm_datadist::ClusterInfo{cluster_id, 0, {{"127.0.0.1", 0}}, {{"127.0.0.1", number}}}};
}
}  // namespace example

#endif  // LLM_DATADIST_EXAMPLES_CPP_KV_CACHE_H_
