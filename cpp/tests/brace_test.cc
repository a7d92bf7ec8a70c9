/** Compiles with all warnings as errors: every struct, initialised by position as programs do. */
#include <gtest/gtest.h>

#include "external/ge_common/ge_api_error_codes.h"
#include "llm_datadist/llm_datadist.h"
#include "llm_datadist/llm_engine_types.h"
#include "llm_datadist/llm_error_codes.h"

namespace {
using namespace llm_datadist;  // NOLINT(google-build-using-namespace): as programs do

TEST(Braces, EveryStruct) {
  const IpInfo ip{"127.0.0.1", 26000};
  const IpInfo whole_ip{"127.0.0.1", 26000, {}};
  const ClusterInfo cluster{1, 0, {{"127.0.0.1", 26000}}, {{"127.0.0.1", 26001}}};
  const ClusterInfo whole_cluster{1, 0, {ip}, {whole_ip}, {}};
  const CacheIndex index{1U, 2, 3U, {}};
  const CacheIndex no_index = {};
  const CacheDesc desc{CachePlacement::kHost, 4U, DT_INT32, {8, 16}, {}};
  const Cache cache{5, {0x1000U}, desc, {}};
  const KvCacheExtParam ext{{0, 0}, {1, 1}, 2, {}};
  const KvCacheExtParam defaults{};
  const RegisterCfg cfg{};
  EXPECT_STREQ(cluster.remote_ip_infos[0].ip.GetString(), "127.0.0.1");
  EXPECT_EQ(whole_cluster.remote_ip_infos[0].port, 26000U);
  EXPECT_EQ(index.batch_index + no_index.batch_index, 3U);
  EXPECT_EQ(cache.cache_desc.shape.size(), 2U);
  EXPECT_EQ(ext.dst_layer_range.first, 1);
  EXPECT_EQ(defaults.src_layer_range.first, -1);
  EXPECT_EQ(defaults.tensor_num_per_layer, kDefaultTensorNumPerLayer);
  EXPECT_EQ(cfg.reserved[127], 0U);
  EXPECT_EQ(CacheDesc{}.placement, CachePlacement::kDevice);
  EXPECT_EQ(CacheDesc{}.data_type, DT_UNDEFINED);
  EXPECT_EQ(Cache{}.cache_id, -1);
}

TEST(Codes, Values) {
  EXPECT_EQ(LLM_FAILED, 0xFFFFFFFFU);
  EXPECT_EQ(LLM_OUT_OF_MEMORY, 0x5010B01CU);
  EXPECT_EQ(LLM_EXIST_LINK, ge::LLM_EXIST_LINK);
  EXPECT_EQ(ge::LLM_NO_FREE_BLOCK, 0x5010B012U);
  GE_ERRORNO_DEFINE(0b01, 0b01, 0b000, 8, 0b01011, made, 26);
  EXPECT_EQ(made, LLM_TIMEOUT);
  EXPECT_STREQ(ge::LlmStatusDescription(LLM_SUCCESS), "success");
  EXPECT_STREQ(ge::LlmStatusDescription(1U), "unknown status");
  EXPECT_STREQ(llm::LLM_OPTION_ROLE, "llm.Role");
}

TEST(AscendStrings, BehaveLikeText) {
  const AscendString nothing;
  const AscendString null(nullptr);
  const AscendString text = "abcdef";
  EXPECT_STREQ(nothing.GetString(), "");
  EXPECT_EQ(nothing.GetLength(), 0U);
  EXPECT_TRUE(null == nothing);
  EXPECT_TRUE(null == "");
  EXPECT_EQ(text.GetLength(), 6U);
  EXPECT_EQ(text.Find("cd"), 2U);
  EXPECT_EQ(text.Find("x"), SIZE_MAX);
  EXPECT_STREQ(AscendString("abcdef", 3U).GetString(), "abc");
  EXPECT_TRUE(text == "abcdef");
  EXPECT_TRUE(text != "abc");
  EXPECT_TRUE(text != AscendString("abc"));
  EXPECT_TRUE(AscendString("a") < text);
  EXPECT_TRUE(AscendString("b") > text);
  EXPECT_TRUE(text <= text);
  EXPECT_TRUE(text >= text);
  EXPECT_EQ(std::hash<AscendString>()(text), AscendString("abcdef").Hash());
  AscendString copy = text;
  copy = "other";
  EXPECT_TRUE(text == "abcdef");
  std::map<AscendString, AscendString> options;
  options[OPTION_DEVICE_ID] = std::string("3").c_str();
  EXPECT_TRUE(options["llm.DeviceId"] == "3");
}
}  // namespace
