/** RegisterKvCache, UnregisterKvCache, and the calls that need a pool. */
#include "kit.h"

namespace {
using namespace kit;  // NOLINT(google-build-using-namespace)
using namespace llm_datadist;  // NOLINT(google-build-using-namespace)

class Register : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(dist.Initialize(Basic()), LLM_SUCCESS); }

  Status Try(const CacheDesc &desc, const std::vector<uint64_t> &addrs) {
    int64_t cache_id = 77;
    const Status status = dist.RegisterKvCache(desc, addrs, {}, cache_id);
    EXPECT_EQ(cache_id != 77, status == LLM_SUCCESS);
    return status;
  }

  CacheDesc Desc(uint32_t tensors, std::vector<int64_t> shape, DataType type = DT_INT32) const {
    return {CachePlacement::kDevice, tensors, type, std::move(shape), {}};
  }

  alignas(8) uint8_t memory[4096] = {};
  const uint64_t addr = reinterpret_cast<uint64_t>(&memory[0]);
  LlmDataDist dist{1U, LlmRole::kPrompt};
};

TEST_F(Register, Addresses) {
  EXPECT_EQ(Try(Desc(0U, {4}), {}), LLM_PARAM_INVALID);
  EXPECT_EQ(Try(Desc(2U, {4}), {addr}), LLM_PARAM_INVALID);
  EXPECT_EQ(Try(Desc(1U, {4}), {addr, addr}), LLM_PARAM_INVALID);
  EXPECT_EQ(Try(Desc(2U, {4}), {addr, 0U}), LLM_PARAM_INVALID);
  EXPECT_EQ(Try(Desc(1U, {4}), {UINT64_MAX}), LLM_PARAM_INVALID);
  EXPECT_EQ(Try(Desc(1U, {4}), {addr}), LLM_SUCCESS);
}

TEST_F(Register, Shapes) {
  const std::vector<std::vector<int64_t>> wrong = {
      {}, std::vector<int64_t>(32U, 1), {0, 4}, {4, -1}, {INT64_MAX, INT64_MAX}, {1LL << 62}};
  for (const std::vector<int64_t> &shape : wrong) {
    EXPECT_EQ(Try(Desc(1U, shape), {addr}), LLM_PARAM_INVALID) << ::testing::PrintToString(shape);
  }
  EXPECT_EQ(Try(Desc(1U, std::vector<int64_t>(31U, 1)), {addr}), LLM_SUCCESS);
}

TEST_F(Register, DataTypes) {
  for (int32_t type = -1; type <= 50; ++type) {
    const bool none = type < 0 || type == 5 || type == DT_UNDEFINED || type == DT_RESOURCE || type == DT_VARIANT ||
                      type >= ge::DT_MAX;
    EXPECT_EQ(Try(Desc(1U, {4, 8}, static_cast<DataType>(type)), {addr}), none ? LLM_PARAM_INVALID : LLM_SUCCESS)
        << type;
  }
  EXPECT_EQ(Try(Desc(1U, {4, 3}, DT_INT4), {addr}), LLM_PARAM_INVALID);
}

TEST_F(Register, Placement) {
  CacheDesc desc = Desc(1U, {4});
  desc.placement = CachePlacement::kHost;
  EXPECT_EQ(Try(desc, {addr}), LLM_SUCCESS);
  desc.placement = static_cast<CachePlacement>(2);
  EXPECT_EQ(Try(desc, {addr}), LLM_PARAM_INVALID);
}

TEST_F(Register, IdsCountFromOneAndMemoryMayBeShared) {
  for (int64_t expected = 1; expected <= 3; ++expected) {
    int64_t cache_id = 0;
    ASSERT_EQ(dist.RegisterKvCache(Desc(1U, {4}), {addr}, {}, cache_id), LLM_SUCCESS);
    EXPECT_EQ(cache_id, expected);
  }
}

TEST_F(Register, AtMost240Addresses) {
  EXPECT_EQ(Try(Desc(240U, {4}), std::vector<uint64_t>(240U, addr)), LLM_SUCCESS);
  EXPECT_EQ(Try(Desc(1U, {4}), {addr}), LLM_PARAM_INVALID);
}

TEST_F(Register, Unregister) {
  int64_t cache_id = 0;
  ASSERT_EQ(dist.RegisterKvCache(Desc(1U, {4}), {addr}, {}, cache_id), LLM_SUCCESS);
  EXPECT_EQ(dist.UnregisterKvCache(cache_id), LLM_SUCCESS);
  EXPECT_EQ(dist.UnregisterKvCache(cache_id), LLM_SUCCESS);
  EXPECT_EQ(dist.UnregisterKvCache(-5), LLM_SUCCESS);
}

TEST_F(Register, WithoutAPoolThereIsNoAllocation) {
  Cache cache;
  EXPECT_EQ(dist.AllocateCache(Desc(1U, {4}), cache), LLM_FEATURE_NOT_ENABLED);
  EXPECT_EQ(dist.DeallocateCache(1), LLM_FEATURE_NOT_ENABLED);
  EXPECT_EQ(dist.CopyKvCache({}, {}), LLM_FEATURE_NOT_ENABLED);
  EXPECT_EQ(dist.CopyKvBlocks({}, {}, {0U}, {{1U}}), LLM_FEATURE_NOT_ENABLED);
}

class Pool : public ::testing::Test {
 protected:
  void SetUp() override {
    Options options = Basic();
    options["llm.MemPoolConfig"] = "{\"memory_size\": 1048576, \"page_shift\": 12}";
    ASSERT_EQ(dist.Initialize(options), LLM_SUCCESS);
  }

  Cache Make(std::vector<int64_t> shape, uint32_t tensors = 2U) {
    Cache cache;
    EXPECT_EQ(dist.AllocateCache({CachePlacement::kDevice, tensors, DT_INT32, shape, {}}, cache), LLM_SUCCESS);
    for (size_t i = 0U; i < cache.tensor_addrs.size(); ++i) {
      int32_t *const tensor = Tensor(cache, i);
      for (int32_t j = 0; j < shape[0] * shape[1]; ++j) {
        tensor[j] = static_cast<int32_t>(cache.cache_id * 10000 + static_cast<int64_t>(i) * 1000) + j;
      }
    }
    return cache;
  }

  static int32_t *Tensor(const Cache &cache, size_t index) {
    return reinterpret_cast<int32_t *>(cache.tensor_addrs[index]);
  }

  LlmDataDist dist{1U, LlmRole::kPrompt};
};

TEST_F(Pool, Allocate) {
  const Cache cache = Make({4, 8});
  EXPECT_EQ(cache.cache_id, 1);
  EXPECT_EQ(cache.tensor_addrs.size(), 2U);
  EXPECT_EQ(cache.cache_desc.shape, (std::vector<int64_t>{4, 8}));
  Cache other;
  EXPECT_EQ(dist.AllocateCache({CachePlacement::kHost, 1U, DT_INT32, {4}, {}}, other), LLM_PARAM_INVALID);
  EXPECT_EQ(dist.AllocateCache({CachePlacement::kDevice, 0U, DT_INT32, {4}, {}}, other), LLM_PARAM_INVALID);
  EXPECT_EQ(dist.AllocateCache({CachePlacement::kDevice, 1U, DT_INT32, {1 << 20}, {}}, other), LLM_OUT_OF_MEMORY);
  EXPECT_EQ(other.cache_id, -1);
}

TEST_F(Pool, DeallocateGivesTheMemoryBack) {
  for (int round = 0; round < 5; ++round) {
    const Cache cache = Make({4, 32768});
    EXPECT_EQ(dist.DeallocateCache(cache.cache_id), LLM_SUCCESS);
    EXPECT_EQ(dist.DeallocateCache(cache.cache_id), LLM_SUCCESS);
    EXPECT_EQ(dist.CopyKvCache(cache, cache, 0U, 1U), LLM_KV_CACHE_NOT_EXIST);
    EXPECT_EQ(dist.CopyKvBlocks(cache, cache, {0U}, {{1U}}), LLM_KV_CACHE_NOT_EXIST);
    const Cache small = Make({4, 4});
    EXPECT_EQ(dist.CopyKvBlocks(cache, small, {0U}, {{1U}}), LLM_KV_CACHE_NOT_EXIST);
    EXPECT_EQ(dist.DeallocateCache(small.cache_id), LLM_SUCCESS);
  }
}

TEST_F(Pool, CopyKvCache) {
  const Cache from = Make({4, 8});
  const Cache to = Make({2, 8});
  EXPECT_EQ(dist.CopyKvCache(from, to, 3U, 1U, 8U, 4), LLM_SUCCESS);
  EXPECT_EQ(Tensor(to, 1U)[8 + 1], 21009);
  EXPECT_EQ(Tensor(to, 1U)[8 + 2], 11026);
  EXPECT_EQ(Tensor(to, 1U)[8 + 3], 21011);
  EXPECT_EQ(dist.CopyKvCache(from, to, 3U, 1U), LLM_SUCCESS);
  EXPECT_EQ(Tensor(to, 0U)[15], 10031);
  EXPECT_EQ(dist.CopyKvCache(from, Cache{}), LLM_KV_CACHE_NOT_EXIST);
  EXPECT_EQ(dist.CopyKvCache(Cache{}, to), LLM_KV_CACHE_NOT_EXIST);
  EXPECT_EQ(dist.CopyKvCache(from, to, 4U, 0U), LLM_PARAM_INVALID);
  EXPECT_EQ(dist.CopyKvCache(from, to, 0U, 2U), LLM_PARAM_INVALID);
  EXPECT_EQ(dist.CopyKvCache(from, to, 0U, 0U, 32U), LLM_PARAM_INVALID);
  EXPECT_EQ(dist.CopyKvCache(from, to, 0U, 0U, UINT64_MAX), LLM_PARAM_INVALID);
  EXPECT_EQ(dist.CopyKvCache(from, to, 0U, 0U, 4U, 32), LLM_PARAM_INVALID);
  EXPECT_EQ(dist.CopyKvCache(from, to, 0U, 0U, 0U, -2), LLM_PARAM_INVALID);
  EXPECT_EQ(dist.CopyKvCache(from, Make({4, 8}, 3U)), LLM_PARAM_INVALID);
}

TEST_F(Pool, CopyKvBlocks) {
  const Cache from = Make({4, 8});
  const Cache to = Make({6, 8});
  EXPECT_EQ(dist.CopyKvBlocks(from, to, {1U, 3U}, {{0U, 5U}, {2U}}), LLM_SUCCESS);
  EXPECT_EQ(Tensor(to, 1U)[0], 11008);
  EXPECT_EQ(Tensor(to, 1U)[5 * 8], 11008);
  EXPECT_EQ(Tensor(to, 1U)[2 * 8 + 7], 11031);
  EXPECT_EQ(Tensor(to, 1U)[8], 21008);
  EXPECT_EQ(dist.CopyKvBlocks(from, from, {0U}, {{1U, 2U}}), LLM_SUCCESS);
  EXPECT_EQ(Tensor(from, 0U)[2 * 8], 10000);
  EXPECT_EQ(dist.CopyKvBlocks(from, Cache{}, {0U}, {{1U}}), LLM_KV_CACHE_NOT_EXIST);
  EXPECT_EQ(dist.CopyKvBlocks(from, to, {0U, 1U}, {{1U}}), LLM_PARAM_INVALID);
  EXPECT_EQ(dist.CopyKvBlocks(from, to, {4U}, {{1U}}), LLM_PARAM_INVALID);
  EXPECT_EQ(dist.CopyKvBlocks(from, to, {0U}, {{6U}}), LLM_PARAM_INVALID);
  EXPECT_EQ(dist.CopyKvBlocks(from, from, {UINT64_MAX}, {{1U}}), LLM_PARAM_INVALID);
  EXPECT_EQ(dist.CopyKvBlocks(from, Make({4, 4}), {0U}, {{1U}}), LLM_FAILED);
  EXPECT_EQ(dist.CopyKvBlocks(from, Make({4, 8}, 3U), {0U}, {{1U}}), LLM_PARAM_INVALID);
}
}  // namespace
