/** PullKvCache and PullKvBlocks: every status, and the bytes. */
#include "kit.h"

namespace {
using namespace kit;  // NOLINT(google-build-using-namespace)
using namespace llm_datadist;  // NOLINT(google-build-using-namespace)

class Pull : public Pair {
 public:
  Status Layers(std::pair<int32_t, int32_t> src, std::pair<int32_t, int32_t> dst, uint8_t per_layer = 2U) {
    return here.PullKvCache(Theirs(), mine.cache, 0U, -1, KvCacheExtParam{src, dst, per_layer, {}});
  }

  Status BlockLayers(std::pair<int32_t, int32_t> src, std::pair<int32_t, int32_t> dst, uint8_t per_layer = 2U) {
    return here.PullKvBlocks(Theirs(), mine.cache, {1U}, {2U}, KvCacheExtParam{src, dst, per_layer, {}});
  }

  Cache Unknown() const {
    Cache cache;
    cache.cache_id = 99;
    return cache;
  }

  void Unlink() {
    std::vector<Status> rets;
    ASSERT_EQ(here.UnlinkLlmClusters({Peer(2U, port)}, rets), LLM_SUCCESS);
  }

  /** A cache of the peer with other geometry; its index. */
  CacheIndex Other(Tensors &tensors, uint32_t batch_index = 0U) {
    EXPECT_EQ(tensors.Register(there), LLM_SUCCESS);
    return {2U, tensors.cache.cache_id, batch_index, {}};
  }
};

TEST_F(Pull, WholeEntry) {
  const std::vector<int32_t> before = mine.Row(0U, 4U);
  ASSERT_EQ(here.PullKvCache(Theirs(5U), mine.cache, 3U), LLM_SUCCESS);
  for (size_t tensor = 0U; tensor < 4U; ++tensor) {
    EXPECT_EQ(mine.Row(tensor, 3U), theirs.Row(tensor, 5U));
  }
  EXPECT_EQ(mine.Row(0U, 4U), before);
}

TEST_F(Pull, OnlyTheIdOfTheCacheCounts) {
  Cache cache;
  cache.cache_id = mine.cache.cache_id;
  cache.cache_desc = {CachePlacement::kHost, 99U, DT_STRING, {-1}, {}};
  cache.tensor_addrs = {1U};
  EXPECT_EQ(here.PullKvCache(Theirs(), cache), LLM_SUCCESS);
  EXPECT_EQ(here.PullKvBlocks(Theirs(), cache, {1U}, {1U}), LLM_SUCCESS);
}

TEST_F(Pull, Size) {
  const std::vector<int32_t> before = mine.Row(0U, 0U);
  ASSERT_EQ(here.PullKvCache(Theirs(), mine.cache, 0U, 8), LLM_SUCCESS);
  EXPECT_EQ(mine.Row(0U, 0U)[1], theirs.Row(0U, 0U)[1]);
  EXPECT_EQ(mine.Row(0U, 0U)[2], before[2]);
  for (const int64_t size : {int64_t{0}, int64_t{-2}, INT64_MIN, int64_t{65}, INT64_MAX}) {
    EXPECT_EQ(here.PullKvCache(Theirs(), mine.cache, 0U, size), LLM_PARAM_INVALID) << size;
  }
}

TEST_F(Pull, LayerRanges) {
  const std::vector<int32_t> before = mine.Row(0U, 0U);
  ASSERT_EQ(Layers({0, 0}, {1, 1}), LLM_SUCCESS);
  EXPECT_EQ(mine.Row(0U, 0U), before);
  EXPECT_EQ(mine.Row(2U, 0U), theirs.Row(0U, 0U));
  EXPECT_EQ(mine.Row(3U, 0U), theirs.Row(1U, 0U));
  EXPECT_EQ(Layers({0, 1}, {0, 1}), LLM_SUCCESS);
  EXPECT_EQ(Layers({2, 3}, {0, 1}, 1U), LLM_SUCCESS);
  EXPECT_EQ(mine.Row(0U, 0U), theirs.Row(2U, 0U));
}

TEST_F(Pull, ARangeThatIsNotGivenIsTheOtherOne) {
  ASSERT_EQ(Layers({1, 1}, {-1, -1}), LLM_SUCCESS);
  EXPECT_EQ(mine.Row(2U, 0U), theirs.Row(2U, 0U));
  ASSERT_EQ(Layers({-1, -1}, {3, 3}, 1U), LLM_SUCCESS);
  EXPECT_EQ(mine.Row(3U, 0U), theirs.Row(3U, 0U));
}

TEST_F(Pull, WrongLayers) {
  for (const auto run : {&Pull::Layers, &Pull::BlockLayers}) {
    EXPECT_EQ((this->*run)({-2, 0}, {0, 0}, 2U), LLM_PARAM_INVALID);
    EXPECT_EQ((this->*run)({0, 0}, {-2, -2}, 2U), LLM_PARAM_INVALID);
    EXPECT_EQ((this->*run)({1, 0}, {0, 0}, 2U), LLM_PARAM_INVALID);
    EXPECT_EQ((this->*run)({0, -1}, {0, 0}, 2U), LLM_PARAM_INVALID);
    EXPECT_EQ((this->*run)({0, 0}, {1, 0}, 2U), LLM_PARAM_INVALID);
    EXPECT_EQ((this->*run)({-1, -1}, {-1, -1}, 0U), LLM_PARAM_INVALID);
    EXPECT_EQ((this->*run)({0, 0}, {0, 0}, 3U), LLM_PARAM_INVALID);
    EXPECT_EQ((this->*run)({0, 0}, {2, 2}, 2U), LLM_PARAM_INVALID);
    EXPECT_EQ((this->*run)({2, 2}, {0, 0}, 2U), LLM_PARAM_INVALID);
    EXPECT_EQ((this->*run)({0, 0}, {0, 1}, 2U), LLM_PARAM_INVALID);
    EXPECT_EQ((this->*run)({0, INT32_MAX}, {0, INT32_MAX}, 255U), LLM_PARAM_INVALID);
  }
}

TEST_F(Pull, OwnCluster) {
  const CacheIndex own{1U, mine.cache.cache_id, 0U, {}};
  EXPECT_EQ(here.PullKvCache(own, mine.cache), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PullKvBlocks(own, mine.cache, {1U}, {2U}), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PullKvCache(own, Unknown()), LLM_PARAM_INVALID);
}

TEST_F(Pull, UnknownLocalCache) {
  EXPECT_EQ(here.PullKvCache(Theirs(), Unknown()), LLM_KV_CACHE_NOT_EXIST);
  EXPECT_EQ(here.PullKvBlocks(Theirs(), Unknown(), {1U}, {2U}), LLM_KV_CACHE_NOT_EXIST);
}

TEST_F(Pull, LocalBatchIndex) { EXPECT_EQ(here.PullKvCache(Theirs(), mine.cache, 8U), LLM_PARAM_INVALID); }

TEST_F(Pull, WhatIsCheckedBeforeTheLink) {
  Unlink();
  EXPECT_EQ(here.PullKvCache(Theirs(), mine.cache), LLM_NOT_YET_LINK);
  EXPECT_EQ(here.PullKvBlocks(Theirs(), mine.cache, {1U}, {2U}), LLM_NOT_YET_LINK);
  EXPECT_EQ(here.PullKvCache(Theirs(), mine.cache, 0U, 0), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PullKvCache(Theirs(), mine.cache, 0U, 65), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PullKvCache(Theirs(), mine.cache, 8U), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PullKvCache(Theirs(), Unknown()), LLM_KV_CACHE_NOT_EXIST);
  EXPECT_EQ(Layers({0, 0}, {2, 2}), LLM_PARAM_INVALID);
  EXPECT_EQ(Layers({0, 0}, {0, 0}, 3U), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PullKvBlocks(Theirs(1U), mine.cache, {1U}, {2U}), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PullKvBlocks(Theirs(), mine.cache, {}, {}), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PullKvBlocks(Theirs(), Unknown(), {1U}, {2U}), LLM_KV_CACHE_NOT_EXIST);
  EXPECT_EQ(here.PullKvBlocks(Theirs(), mine.cache, {1U}, {8U}), LLM_NOT_YET_LINK);
  EXPECT_EQ(here.PullKvCache({77U, 1, 0U, {}}, mine.cache), LLM_NOT_YET_LINK);
}

TEST_F(Pull, UnknownRemoteCache) {
  for (const int64_t cache_id : {int64_t{99}, int64_t{0}, int64_t{-1}, INT64_MIN}) {
    EXPECT_EQ(here.PullKvCache({2U, cache_id, 0U, {}}, mine.cache), LLM_KV_CACHE_NOT_EXIST) << cache_id;
    EXPECT_EQ(here.PullKvBlocks({2U, cache_id, 0U, {}}, mine.cache, {1U}, {2U}), LLM_KV_CACHE_NOT_EXIST) << cache_id;
  }
  EXPECT_EQ(here.PullKvCache(Theirs(8U), mine.cache), LLM_KV_CACHE_NOT_EXIST);
  ASSERT_EQ(there.UnregisterKvCache(theirs.cache.cache_id), LLM_SUCCESS);
  EXPECT_EQ(here.PullKvCache(Theirs(), mine.cache), LLM_KV_CACHE_NOT_EXIST);
}

TEST_F(Pull, RegisteredAfterLinking) {
  Tensors late(4U, {8, 16}, 500000);
  ASSERT_EQ(here.PullKvCache(Other(late), mine.cache), LLM_SUCCESS);
  EXPECT_EQ(mine.Row(3U, 0U), late.Row(3U, 0U));
}

TEST_F(Pull, CachesThatDoNotFit) {
  Tensors fewer(2U, {8, 16}, 0);
  Tensors shorter(4U, {8, 8}, 0);
  const CacheIndex few = Other(fewer);
  const CacheIndex small = Other(shorter);
  EXPECT_EQ(here.PullKvCache(few, mine.cache), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PullKvBlocks(few, mine.cache, {1U}, {2U}), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PullKvCache(small, mine.cache), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PullKvCache(small, mine.cache, 0U, 32), LLM_SUCCESS);
  EXPECT_EQ(here.PullKvBlocks(small, mine.cache, {1U}, {2U}), LLM_PARAM_INVALID);
}

TEST_F(Pull, TheRemoteStrideCounts) {
  Tensors longer(4U, {4, 32}, 700000);
  const CacheIndex large = Other(longer, 3U);
  ASSERT_EQ(here.PullKvCache(large, mine.cache, 2U), LLM_SUCCESS);
  EXPECT_EQ(mine.Row(1U, 2U)[15], longer.Row(1U, 3U)[15]);
}

TEST_F(Pull, IntoAHostCache) {
  Tensors host(4U, {8, 16}, 0);
  ASSERT_EQ(host.Register(here, CachePlacement::kHost), LLM_SUCCESS);
  ASSERT_EQ(here.PullKvCache(Theirs(1U), host.cache), LLM_SUCCESS);
  EXPECT_EQ(host.Row(0U, 0U), theirs.Row(0U, 1U));
}

TEST_F(Pull, Blocks) {
  const std::vector<int32_t> before = mine.Row(1U, 7U);
  ASSERT_EQ(here.PullKvBlocks(Theirs(), mine.cache, {1U, 2U, 3U, 0U}, {4U, 5U, 6U, 2U}), LLM_SUCCESS);
  for (size_t tensor = 0U; tensor < 4U; ++tensor) {
    EXPECT_EQ(mine.Row(tensor, 4U), theirs.Row(tensor, 1U));
    EXPECT_EQ(mine.Row(tensor, 6U), theirs.Row(tensor, 3U));
    EXPECT_EQ(mine.Row(tensor, 2U), theirs.Row(tensor, 0U));
  }
  EXPECT_EQ(mine.Row(1U, 7U), before);
}

TEST_F(Pull, TheLastOfTwoBlocksWithOneDestinationCounts) {
  ASSERT_EQ(here.PullKvBlocks(Theirs(), mine.cache, {1U, 2U, 3U}, {4U, 4U, 5U}), LLM_SUCCESS);
  EXPECT_EQ(mine.Row(0U, 4U), theirs.Row(0U, 2U));
}

TEST_F(Pull, BlocksOfLayers) {
  const std::vector<int32_t> before = mine.Row(0U, 2U);
  ASSERT_EQ(BlockLayers({0, 0}, {1, 1}), LLM_SUCCESS);
  EXPECT_EQ(mine.Row(0U, 2U), before);
  EXPECT_EQ(mine.Row(2U, 2U), theirs.Row(0U, 1U));
}

TEST_F(Pull, WrongBlocks) {
  EXPECT_EQ(here.PullKvBlocks(Theirs(1U), mine.cache, {1U}, {2U}), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PullKvBlocks(Theirs(), mine.cache, {}, {}), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PullKvBlocks(Theirs(), mine.cache, {}, {1U}), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PullKvBlocks(Theirs(), mine.cache, {1U}, {}), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PullKvBlocks(Theirs(), mine.cache, {1U, 2U}, {2U}), LLM_PARAM_INVALID);
  for (const uint64_t block : {uint64_t{8}, uint64_t{1} << 63, UINT64_MAX, UINT64_MAX - 7U}) {
    EXPECT_EQ(here.PullKvBlocks(Theirs(), mine.cache, {1U}, {block}), LLM_PARAM_INVALID) << block;
    EXPECT_EQ(here.PullKvBlocks(Theirs(), mine.cache, {block}, {1U}), LLM_PARAM_INVALID) << block;
  }
}

TEST(PullTimeout, NoTimeAtAll) {
  const uint16_t port = FreePort();
  LlmDataDist here(1U, LlmRole::kPrompt);
  LlmDataDist there(2U, LlmRole::kPrompt);
  Tensors mine(2U, {2, 2}, 0);
  Tensors theirs(2U, {2, 2}, 0);
  std::vector<Status> rets;
  ASSERT_EQ(here.Initialize(Basic("0")), LLM_SUCCESS);
  ASSERT_EQ(there.Initialize(Listening(port)), LLM_SUCCESS);
  ASSERT_EQ(mine.Register(here), LLM_SUCCESS);
  ASSERT_EQ(theirs.Register(there), LLM_SUCCESS);
  ASSERT_EQ(here.LinkLlmClusters({Peer(2U, port)}, rets, 5000), LLM_SUCCESS);
  EXPECT_EQ(here.PullKvCache({2U, 1, 0U, {}}, mine.cache), LLM_TIMEOUT);
  EXPECT_EQ(here.PullKvBlocks({2U, 1, 0U, {}}, mine.cache, {0U}, {1U}), LLM_TIMEOUT);
  EXPECT_EQ(here.PushKvCache(mine.cache, {2U, 1, 0U, {}}), LLM_TIMEOUT);
  EXPECT_EQ(here.PushKvBlocks(mine.cache, {2U, 1, 0U, {}}, {0U}, {1U}), LLM_TIMEOUT);
}
}  // namespace
