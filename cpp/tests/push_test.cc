/** PushKvCache and PushKvBlocks: every status, and the bytes. */
#include "kit.h"

namespace {
using namespace kit;  // NOLINT(google-build-using-namespace)
using namespace llm_datadist;  // NOLINT(google-build-using-namespace)

class Push : public Pair {
 public:
  Status Layers(std::pair<int32_t, int32_t> src, std::pair<int32_t, int32_t> dst, uint8_t per_layer = 2U) {
    return here.PushKvCache(mine.cache, Theirs(), 0U, -1, KvCacheExtParam{src, dst, per_layer, {}});
  }

  Status BlockLayers(std::pair<int32_t, int32_t> src, std::pair<int32_t, int32_t> dst, uint8_t per_layer = 2U) {
    return here.PushKvBlocks(mine.cache, Theirs(), {1U}, {2U}, KvCacheExtParam{src, dst, per_layer, {}});
  }

  Cache Unknown() const {
    Cache cache;
    cache.cache_id = 99;
    return cache;
  }

  CacheIndex Other(Tensors &tensors) {
    EXPECT_EQ(tensors.Register(there), LLM_SUCCESS);
    return {2U, tensors.cache.cache_id, 0U, {}};
  }
};

TEST_F(Push, WholeEntry) {
  const std::vector<int32_t> before = theirs.Row(0U, 4U);
  ASSERT_EQ(here.PushKvCache(mine.cache, Theirs(3U), 5U), LLM_SUCCESS);
  for (size_t tensor = 0U; tensor < 4U; ++tensor) {
    EXPECT_EQ(theirs.Row(tensor, 3U), mine.Row(tensor, 5U));
  }
  EXPECT_EQ(theirs.Row(0U, 4U), before);
}

TEST_F(Push, OnlyTheIdOfTheCacheCounts) {
  Cache cache;
  cache.cache_id = mine.cache.cache_id;
  cache.cache_desc = {CachePlacement::kHost, 99U, DT_STRING, {-1}, {}};
  EXPECT_EQ(here.PushKvCache(cache, Theirs()), LLM_SUCCESS);
  EXPECT_EQ(theirs.Row(3U, 0U), mine.Row(3U, 0U));
  EXPECT_EQ(here.PushKvBlocks(cache, Theirs(), {1U}, {1U}), LLM_SUCCESS);
}

TEST_F(Push, OnlyWholeEntries) {
  for (const int64_t size : {int64_t{0}, int64_t{1}, int64_t{64}, int64_t{-2}, INT64_MIN, INT64_MAX}) {
    EXPECT_EQ(here.PushKvCache(mine.cache, Theirs(), 0U, size), LLM_PARAM_INVALID) << size;
  }
}

TEST_F(Push, LayerByLayer) {
  const std::vector<int32_t> before = theirs.Row(0U, 0U);
  ASSERT_EQ(Layers({0, 0}, {1, 1}), LLM_SUCCESS);
  EXPECT_EQ(theirs.Row(0U, 0U), before);
  EXPECT_EQ(theirs.Row(2U, 0U), mine.Row(0U, 0U));
  EXPECT_EQ(theirs.Row(3U, 0U), mine.Row(1U, 0U));
  EXPECT_EQ(Layers({0, 1}, {0, 1}), LLM_SUCCESS);
  EXPECT_EQ(theirs.Row(1U, 0U), mine.Row(1U, 0U));
  EXPECT_EQ(Layers({2, 3}, {0, 1}, 1U), LLM_SUCCESS);
  EXPECT_EQ(theirs.Row(0U, 0U), mine.Row(2U, 0U));
  EXPECT_EQ(Layers({0, 0}, {0, 0}, 4U), LLM_SUCCESS);
  EXPECT_EQ(theirs.Row(0U, 0U), mine.Row(0U, 0U));
}

TEST_F(Push, ARangeThatIsNotGivenIsTheOtherOne) {
  const std::vector<int32_t> before = theirs.Row(0U, 0U);
  ASSERT_EQ(Layers({1, 1}, {-1, -1}), LLM_SUCCESS);
  EXPECT_EQ(theirs.Row(2U, 0U), mine.Row(2U, 0U));
  ASSERT_EQ(Layers({-1, -1}, {1, 1}, 1U), LLM_SUCCESS);
  EXPECT_EQ(theirs.Row(1U, 0U), mine.Row(1U, 0U));
  EXPECT_EQ(theirs.Row(0U, 0U), before);
}

TEST_F(Push, WrongLayers) {
  for (const auto run : {&Push::Layers, &Push::BlockLayers}) {
    EXPECT_EQ((this->*run)({-2, 0}, {0, 2}, 2U), LLM_PARAM_INVALID);
    EXPECT_EQ((this->*run)({0, 0}, {-2, -2}, 2U), LLM_PARAM_INVALID);
    EXPECT_EQ((this->*run)({1, 0}, {1, 0}, 2U), LLM_PARAM_INVALID);
    EXPECT_EQ((this->*run)({0, 0}, {0, 1}, 2U), LLM_PARAM_INVALID);
    EXPECT_EQ((this->*run)({0, 1}, {-1, -1}, 2U), LLM_PARAM_INVALID);
    EXPECT_EQ((this->*run)({-1, -1}, {0, 1}, 2U), LLM_PARAM_INVALID);
    EXPECT_EQ((this->*run)({-1, -1}, {-1, -1}, 0U), LLM_PARAM_INVALID);
    EXPECT_EQ((this->*run)({-1, -1}, {-1, -1}, 3U), LLM_PARAM_INVALID);
    EXPECT_EQ((this->*run)({-1, -1}, {-1, -1}, 5U), LLM_PARAM_INVALID);
    EXPECT_EQ((this->*run)({0, 0}, {0, 0}, 3U), LLM_PARAM_INVALID);
    EXPECT_EQ((this->*run)({0, 0}, {2, 2}, 2U), LLM_PARAM_INVALID);
    EXPECT_EQ((this->*run)({2, 2}, {0, 0}, 2U), LLM_PARAM_INVALID);
    EXPECT_EQ((this->*run)({0, INT32_MAX}, {0, INT32_MAX}, 255U), LLM_PARAM_INVALID);
  }
}

TEST_F(Push, UnknownCaches) {
  EXPECT_EQ(here.PushKvCache(Unknown(), Theirs()), LLM_KV_CACHE_NOT_EXIST);
  EXPECT_EQ(here.PushKvBlocks(Unknown(), Theirs(), {1U}, {2U}), LLM_KV_CACHE_NOT_EXIST);
  for (const int64_t cache_id : {int64_t{99}, int64_t{0}, int64_t{-1}}) {
    EXPECT_EQ(here.PushKvCache(mine.cache, {2U, cache_id, 0U, {}}), LLM_KV_CACHE_NOT_EXIST) << cache_id;
    EXPECT_EQ(here.PushKvBlocks(mine.cache, {2U, cache_id, 0U, {}}, {1U}, {2U}), LLM_KV_CACHE_NOT_EXIST) << cache_id;
  }
  ASSERT_EQ(here.UnregisterKvCache(mine.cache.cache_id), LLM_SUCCESS);
  EXPECT_EQ(here.PushKvCache(mine.cache, Theirs()), LLM_KV_CACHE_NOT_EXIST);
}

TEST_F(Push, NotLinked) {
  std::vector<Status> rets;
  ASSERT_EQ(here.UnlinkLlmClusters({Peer(2U, port)}, rets), LLM_SUCCESS);
  EXPECT_EQ(here.PushKvCache(mine.cache, Theirs()), LLM_NOT_YET_LINK);
  EXPECT_EQ(here.PushKvBlocks(mine.cache, Theirs(), {1U}, {2U}), LLM_NOT_YET_LINK);
  // In the order of the checks: these come first ...
  EXPECT_EQ(here.PushKvCache(mine.cache, Theirs(), 0U, 8), LLM_PARAM_INVALID);
  EXPECT_EQ(Layers({0, 0}, {0, 1}), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PushKvCache(Unknown(), Theirs()), LLM_KV_CACHE_NOT_EXIST);
  EXPECT_EQ(here.PushKvBlocks(mine.cache, Theirs(1U), {1U}, {2U}), LLM_PARAM_INVALID);
  // ... and these later.
  EXPECT_EQ(Layers({5, 5}, {0, 0}), LLM_NOT_YET_LINK);
  EXPECT_EQ(Layers({0, 0}, {0, 0}, 3U), LLM_NOT_YET_LINK);
  EXPECT_EQ(here.PushKvCache(mine.cache, Theirs(), 8U), LLM_NOT_YET_LINK);
  EXPECT_EQ(here.PushKvBlocks(mine.cache, Theirs(), {8U}, {2U}), LLM_NOT_YET_LINK);
  EXPECT_EQ(here.PushKvCache(mine.cache, {1U, 1, 0U, {}}), LLM_NOT_YET_LINK);
}

TEST_F(Push, BatchIndices) {
  EXPECT_EQ(here.PushKvCache(mine.cache, Theirs(8U)), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PushKvCache(mine.cache, Theirs(), 8U), LLM_PARAM_INVALID);
}

TEST_F(Push, TheRegisteredPlacementCounts) {
  Tensors host(4U, {8, 16}, 0);
  ASSERT_EQ(host.Register(here, CachePlacement::kHost), LLM_SUCCESS);
  EXPECT_EQ(here.PushKvCache(host.cache, Theirs()), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PushKvBlocks(host.cache, Theirs(), {1U}, {2U}), LLM_PARAM_INVALID);
}

TEST_F(Push, CachesThatDoNotFit) {
  Tensors fewer(2U, {8, 16}, 0);
  Tensors shorter(4U, {8, 8}, 0);
  Tensors longer(4U, {4, 32}, 0);
  const CacheIndex few = Other(fewer);
  const CacheIndex small = Other(shorter);
  CacheIndex large = Other(longer);
  EXPECT_EQ(here.PushKvCache(mine.cache, few), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PushKvCache(mine.cache, small), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PushKvBlocks(mine.cache, few, {1U}, {2U}), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PushKvBlocks(mine.cache, small, {1U}, {2U}), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PushKvBlocks(mine.cache, large, {1U}, {2U}), LLM_PARAM_INVALID);
  large.batch_index = 3U;
  const std::vector<int32_t> before = longer.Row(0U, 3U);
  ASSERT_EQ(here.PushKvCache(mine.cache, large, 7U), LLM_SUCCESS);
  EXPECT_EQ(longer.Row(0U, 3U)[15], mine.Row(0U, 7U)[15]);
  EXPECT_EQ(longer.Row(0U, 3U)[16], before[16]);
}

TEST_F(Push, Blocks) {
  const std::vector<int32_t> before = theirs.Row(1U, 7U);
  ASSERT_EQ(here.PushKvBlocks(mine.cache, Theirs(), {5U, 6U, 7U, 0U}, {1U, 2U, 3U, 6U}), LLM_SUCCESS);
  for (size_t tensor = 0U; tensor < 4U; ++tensor) {
    EXPECT_EQ(theirs.Row(tensor, 1U), mine.Row(tensor, 5U));
    EXPECT_EQ(theirs.Row(tensor, 3U), mine.Row(tensor, 7U));
    EXPECT_EQ(theirs.Row(tensor, 6U), mine.Row(tensor, 0U));
  }
  EXPECT_EQ(theirs.Row(1U, 7U), before);
}

TEST_F(Push, BlocksTensorByTensor) {
  for (int32_t tensor = 0; tensor < 4; ++tensor) {
    const KvCacheExtParam layer{{tensor, tensor}, {tensor, tensor}, 1U, {}};
    ASSERT_EQ(here.PushKvBlocks(mine.cache, Theirs(), {5U, 6U, 7U}, {5U, 6U, 7U}, layer), LLM_SUCCESS);
    EXPECT_EQ(theirs.Row(static_cast<size_t>(tensor), 6U), mine.Row(static_cast<size_t>(tensor), 6U));
  }
}

TEST_F(Push, WrongBlocks) {
  EXPECT_EQ(here.PushKvBlocks(mine.cache, Theirs(1U), {1U}, {2U}), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PushKvBlocks(mine.cache, Theirs(), {}, {}), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PushKvBlocks(mine.cache, Theirs(), {}, {1U}), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PushKvBlocks(mine.cache, Theirs(), {1U}, {}), LLM_PARAM_INVALID);
  EXPECT_EQ(here.PushKvBlocks(mine.cache, Theirs(), {1U, 2U}, {2U}), LLM_PARAM_INVALID);
  for (const uint64_t block : {uint64_t{8}, uint64_t{1} << 63, UINT64_MAX}) {
    EXPECT_EQ(here.PushKvBlocks(mine.cache, Theirs(), {1U}, {block}), LLM_PARAM_INVALID) << block;
    EXPECT_EQ(here.PushKvBlocks(mine.cache, Theirs(), {block}, {1U}), LLM_PARAM_INVALID) << block;
  }
}
}  // namespace
