/** Initialize, Finalize, SetRole. */
#include "kit.h"

namespace {
using namespace kit;  // NOLINT(google-build-using-namespace)
using namespace llm_datadist;  // NOLINT(google-build-using-namespace)

Options With(Options options, const char *key, const char *value) {
  options[key] = value;
  return options;
}

TEST(Life, EverythingFailsBeforeInitializeAndAfterFinalize) {
  LlmDataDist dist(1U, LlmRole::kPrompt);
  for (int round = 0; round < 2; ++round) {
    std::vector<Status> rets{7U};
    int64_t cache_id = 77;
    Cache cache;
    EXPECT_EQ(dist.SetRole(LlmRole::kMix), LLM_FAILED);
    EXPECT_EQ(dist.LinkLlmClusters({Peer(2U, 1U)}, rets), LLM_FAILED);
    EXPECT_EQ(dist.UnlinkLlmClusters({Peer(2U, 1U)}, rets), LLM_FAILED);
    EXPECT_EQ(rets, std::vector<Status>{7U});
    EXPECT_EQ(dist.RegisterKvCache({}, {1U}, {}, cache_id), LLM_FAILED);
    EXPECT_EQ(cache_id, 77);
    EXPECT_EQ(dist.UnregisterKvCache(1), LLM_FAILED);
    EXPECT_EQ(dist.PullKvCache({}, {}), LLM_FAILED);
    EXPECT_EQ(dist.PullKvBlocks({}, {}, {}, {}), LLM_FAILED);
    EXPECT_EQ(dist.PushKvCache({}, {}), LLM_FAILED);
    EXPECT_EQ(dist.PushKvBlocks({}, {}, {}, {}), LLM_FAILED);
    EXPECT_EQ(dist.AllocateCache({}, cache), LLM_FEATURE_NOT_ENABLED);
    EXPECT_EQ(dist.DeallocateCache(1), LLM_FEATURE_NOT_ENABLED);
    EXPECT_EQ(dist.CopyKvCache({}, {}), LLM_FEATURE_NOT_ENABLED);
    EXPECT_EQ(dist.CopyKvBlocks({}, {}, {}, {}), LLM_FEATURE_NOT_ENABLED);
    if (round == 0) {
      ASSERT_EQ(dist.Initialize(Basic()), LLM_SUCCESS);
      dist.Finalize();
      dist.Finalize();
    }
  }
}

TEST(Life, InitializeTwiceIsFineAndKeepsTheFirstOptions) {
  LlmDataDist dist(1U, LlmRole::kPrompt);
  ASSERT_EQ(dist.Initialize(Basic()), LLM_SUCCESS);
  EXPECT_EQ(dist.Initialize({}), LLM_SUCCESS);
}

TEST(Life, InitializeAfterFinalizeCountsCachesFromOne) {
  LlmDataDist dist(1U, LlmRole::kPrompt);
  for (int round = 0; round < 2; ++round) {
    Tensors tensors(2U, {2, 2}, 0);
    ASSERT_EQ(dist.Initialize(Basic()), LLM_SUCCESS);
    ASSERT_EQ(tensors.Register(dist), LLM_SUCCESS);
    EXPECT_EQ(tensors.cache.cache_id, 1);
    dist.Finalize();
  }
}

TEST(Life, WrongRole) {
  for (const int32_t role : {0, 4, -1, 99}) {
    EXPECT_EQ(LlmDataDist(1U, static_cast<LlmRole>(role)).Initialize(Basic()), LLM_PARAM_INVALID) << role;
  }
}

TEST(Life, WrongOptions) {
  LlmDataDist dist(1U, LlmRole::kPrompt);
  EXPECT_EQ(dist.Initialize({}), LLM_PARAM_INVALID);
  for (const char *device : {"", "x", "-1", "0;1", "1.5", "99999999999"}) {
    EXPECT_EQ(dist.Initialize({{OPTION_DEVICE_ID, device}}), LLM_PARAM_INVALID) << device;
  }
  for (const char *listen : {"", "127.0.0.1", "127.0.0.1:", "host:1", "127.0.0.1:x", "127.0.0.1:-1", "127.0.0.1:65536",
                             "127.0.0.1:4294967296", ":1", "::1:5", "[::1:5", "127.0.0.1:1;127.0.0.1:2", "\xff:1"}) {
    EXPECT_EQ(dist.Initialize(With(Basic(), OPTION_LISTEN_IP_INFO, listen)), LLM_PARAM_INVALID) << listen;
  }
  for (const char *wait : {"", "-1", "x", "1.0", "10 "}) {
    EXPECT_EQ(dist.Initialize(Basic(wait)), LLM_PARAM_INVALID) << wait;
  }
  for (const char *backend : {"", "hccl", "HIXL"}) {
    EXPECT_EQ(dist.Initialize(With(Basic(), OPTION_TRANSFER_BACKEND, backend)), LLM_PARAM_INVALID) << backend;
  }
  EXPECT_EQ(dist.Initialize(With(Basic(), OPTION_TRANSFER_BACKEND, "hixl")), LLM_PARAM_INVALID);
  const Options hixl = With(Listening(FreePort()), OPTION_TRANSFER_BACKEND, "hixl");
  EXPECT_EQ(dist.Initialize(With(hixl, OPTION_LOCAL_COMM_RES, "{")), LLM_PARAM_INVALID);
  EXPECT_EQ(dist.Initialize(With(hixl, OPTION_LOCAL_COMM_RES, "{\"version\": \"9\"}")), LLM_PARAM_INVALID);
  EXPECT_EQ(dist.Initialize(With(Basic(), "llm.MemPoolConfig", "{}")), LLM_PARAM_INVALID);
  // None of these failures is for ever, and unknown keys do not matter.
  EXPECT_EQ(dist.Initialize(With(Basic("0"), "llm.Nonsense", "x")), LLM_SUCCESS);
}

TEST(Life, Ipv6) {
  LlmDataDist dist(1U, LlmRole::kPrompt);
  const std::string listen = "[::1]:" + std::to_string(FreePort());
  EXPECT_EQ(dist.Initialize(With(Basic(), OPTION_LISTEN_IP_INFO, listen.c_str())), LLM_SUCCESS);
}

TEST(Life, PortInUse) {
  const Socket taken(true);
  LlmDataDist dist(1U, LlmRole::kPrompt);
  EXPECT_EQ(dist.Initialize(Listening(taken.Port())), LLM_FAILED);
  EXPECT_EQ(dist.Initialize(Listening(FreePort())), LLM_SUCCESS);
}

class Roles : public Pair {};

TEST_F(Roles, WrongArguments) {
  EXPECT_EQ(here.SetRole(static_cast<LlmRole>(0)), LLM_PARAM_INVALID);
  EXPECT_EQ(here.SetRole(LlmRole::kEnd), LLM_PARAM_INVALID);
  EXPECT_EQ(here.SetRole(LlmRole::kPrompt, {{OPTION_LISTEN_IP_INFO, "nowhere"}}), LLM_PARAM_INVALID);
}

TEST_F(Roles, LinksStandInTheWayOnBothSides) {
  EXPECT_EQ(here.SetRole(LlmRole::kDecoder), LLM_EXIST_LINK);
  EXPECT_EQ(there.SetRole(LlmRole::kPrompt), LLM_EXIST_LINK);
}

TEST_F(Roles, SwitchingMovesTheListenerAndKeepsTheCaches) {
  std::vector<Status> rets;
  ASSERT_EQ(here.UnlinkLlmClusters({Peer(2U, port)}, rets), LLM_SUCCESS);
  const uint16_t other = FreePort();
  EXPECT_EQ(here.SetRole(LlmRole::kDecoder, Listening(other)), LLM_SUCCESS);
  EXPECT_EQ(here.SetRole(LlmRole::kDecoder, Listening(other)), LLM_SUCCESS);
  EXPECT_EQ(there.SetRole(LlmRole::kPrompt), LLM_SUCCESS);
  EXPECT_EQ(here.LinkLlmClusters({Peer(2U, port)}, rets), LLM_LINK_FAILED);
  ASSERT_EQ(there.LinkLlmClusters({Peer(1U, other)}, rets), LLM_SUCCESS);
  EXPECT_EQ(there.PullKvCache({1U, 1, 0U, {}}, theirs.cache), LLM_SUCCESS);
  EXPECT_EQ(theirs.Row(3U, 0U), mine.Row(3U, 0U));
}

TEST_F(Roles, PortInUse) {
  const Socket taken(true);
  std::vector<Status> rets;
  ASSERT_EQ(here.UnlinkLlmClusters({Peer(2U, port)}, rets), LLM_SUCCESS);
  EXPECT_EQ(here.SetRole(LlmRole::kPrompt, Listening(taken.Port())), LLM_FAILED);
}

TEST(HixlRoles, TheAddressStays) {
  const uint16_t port = FreePort();
  LlmDataDist dist(1U, LlmRole::kPrompt);
  ASSERT_EQ(dist.Initialize(With(Listening(port), OPTION_TRANSFER_BACKEND, "hixl")), LLM_SUCCESS);
  EXPECT_EQ(dist.SetRole(LlmRole::kDecoder), LLM_SUCCESS);
  EXPECT_EQ(dist.SetRole(LlmRole::kDecoder, Listening(port)), LLM_SUCCESS);
  EXPECT_EQ(dist.SetRole(LlmRole::kPrompt, Listening(FreePort())), LLM_FEATURE_NOT_ENABLED);
}
}  // namespace
