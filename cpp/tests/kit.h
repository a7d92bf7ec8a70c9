/**
 * @file kit.h
 * @brief What the tests share: members with caches whose bytes say where they come from.
 */
#ifndef LLM_DATADIST_TESTS_KIT_H_
#define LLM_DATADIST_TESTS_KIT_H_

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "llm_datadist/llm_datadist.h"

namespace kit {
using llm_datadist::AscendString;
using llm_datadist::Cache;
using llm_datadist::CacheDesc;
using llm_datadist::CacheIndex;
using llm_datadist::CachePlacement;
using llm_datadist::ClusterInfo;
using llm_datadist::KvCacheExtParam;
using llm_datadist::LlmDataDist;
using llm_datadist::LlmRole;
using llm_datadist::Status;
using Options = std::map<AscendString, AscendString>;

constexpr const char kLocalhost[] = "127.0.0.1";

/** A socket that listens on a port that the system chose, or holds it without listening. */
class Socket {
 public:
  explicit Socket(bool listening) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    EXPECT_EQ(bind(fd_, reinterpret_cast<sockaddr *>(&address), length), 0);
    if (listening) {
      EXPECT_EQ(listen(fd_, 1), 0);
    }
    EXPECT_EQ(getsockname(fd_, reinterpret_cast<sockaddr *>(&address), &length), 0);
    port_ = ntohs(address.sin_port);
  }
  Socket(const Socket &) = delete;
  Socket &operator=(const Socket &) = delete;
  ~Socket() { close(fd_); }
  uint16_t Port() const { return port_; }

 private:
  int fd_;
  uint16_t port_ = 0U;
};

inline uint16_t FreePort() { return Socket(false).Port(); }

inline Options Basic(const char *wait_ms = "5000") {
  return {{llm_datadist::OPTION_DEVICE_ID, "0"}, {llm_datadist::OPTION_SYNC_CACHE_WAIT_TIME, wait_ms}};
}

inline Options Listening(uint16_t port, const char *wait_ms = "5000") {
  Options options = Basic(wait_ms);
  options[llm_datadist::OPTION_LISTEN_IP_INFO] = (std::string(kLocalhost) + ":" + std::to_string(port)).c_str();
  return options;
}

inline ClusterInfo Peer(uint64_t cluster_id, uint16_t port) {
  return ClusterInfo{cluster_id, 0, {{kLocalhost, 0}}, {{kLocalhost, port}}};
}

/** Tensors of int32, and the cache that they are registered as. */
struct Tensors {
  Tensors(size_t count, std::vector<int64_t> dims, int32_t first) : shape(std::move(dims)) {
    size_t elements = 1U;
    for (const int64_t dim : shape) {
      elements *= static_cast<size_t>(dim);
    }
    for (size_t i = 0U; i < count; ++i) {
      memory.emplace_back(elements);
      for (int32_t &element : memory.back()) {
        element = first == kNothing ? kNothing : first++;
      }
    }
  }

  Status Register(LlmDataDist &dist, CachePlacement placement = CachePlacement::kDevice) {
    CacheDesc desc;
    desc.placement = placement;
    desc.num_tensors = static_cast<uint32_t>(memory.size());
    desc.data_type = llm_datadist::DT_INT32;
    desc.shape = shape;
    std::vector<uint64_t> addrs;
    for (std::vector<int32_t> &tensor : memory) {
      addrs.push_back(reinterpret_cast<uint64_t>(tensor.data()));
    }
    return dist.RegisterKvCache(desc, addrs, {}, cache.cache_id);
  }

  /** Row @p row of tensor @p tensor. */
  std::vector<int32_t> Row(size_t tensor, size_t row) const {
    const auto width = static_cast<std::ptrdiff_t>(memory[tensor].size()) / shape[0];
    const auto start = memory[tensor].begin() + static_cast<std::ptrdiff_t>(row) * width;
    return {start, start + width};
  }

  static constexpr int32_t kNothing = -1;
  std::vector<int64_t> shape;
  std::vector<std::vector<int32_t>> memory;
  Cache cache;
};

/** Member 1 with 4 tensors of {8, 16}, linked to member 2, which has the same and listens. */
class Pair : public ::testing::Test {
 protected:
  void SetUp() override {
    port = FreePort();
    ASSERT_EQ(here.Initialize(Basic()), llm_datadist::LLM_SUCCESS);
    ASSERT_EQ(there.Initialize(Listening(port)), llm_datadist::LLM_SUCCESS);
    ASSERT_EQ(mine.Register(here), llm_datadist::LLM_SUCCESS);
    ASSERT_EQ(theirs.Register(there), llm_datadist::LLM_SUCCESS);
    Link();
  }

  void Link() {
    std::vector<Status> rets;
    ASSERT_EQ(here.LinkLlmClusters({Peer(2U, port)}, rets, 5000), llm_datadist::LLM_SUCCESS);
  }

  CacheIndex Theirs(uint32_t batch_index = 0U) const { return {2U, theirs.cache.cache_id, batch_index, {}}; }

  uint16_t port = 0U;
  LlmDataDist here{1U, LlmRole::kPrompt};
  LlmDataDist there{2U, LlmRole::kDecoder};
  Tensors mine{4U, {8, 16}, 0};
  Tensors theirs{4U, {8, 16}, 100000};
};
}  // namespace kit

#endif  // LLM_DATADIST_TESTS_KIT_H_
