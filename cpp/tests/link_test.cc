/** LinkLlmClusters and UnlinkLlmClusters. */
#include "kit.h"

namespace {
using namespace kit;  // NOLINT(google-build-using-namespace)
using namespace llm_datadist;  // NOLINT(google-build-using-namespace)

class Links : public Pair {
 protected:
  std::vector<Status> rets{7U};
};

TEST_F(Links, RefusedAsAWholeLeavesRetsAlone) {
  EXPECT_EQ(here.LinkLlmClusters({Peer(3U, port)}, rets, 0), LLM_PARAM_INVALID);
  EXPECT_EQ(here.LinkLlmClusters({Peer(3U, port)}, rets, -1), LLM_PARAM_INVALID);
  EXPECT_EQ(here.LinkLlmClusters({}, rets), LLM_PARAM_INVALID);
  EXPECT_EQ(here.UnlinkLlmClusters({Peer(2U, port)}, rets, 0), LLM_PARAM_INVALID);
  EXPECT_EQ(here.UnlinkLlmClusters({}, rets), LLM_PARAM_INVALID);
  for (const char *ip : {"", "localhost", "1.2.3", "1.2.3.4.5"}) {
    const ClusterInfo remote{3U, 0, {{kLocalhost, 0}}, {{ip, port}}};
    const ClusterInfo local{3U, 0, {{ip, 0}}, {{kLocalhost, port}}};
    EXPECT_EQ(here.LinkLlmClusters({remote}, rets), LLM_PARAM_INVALID) << ip;
    EXPECT_EQ(here.LinkLlmClusters({Peer(2U, port), local}, rets), LLM_PARAM_INVALID) << ip;
    EXPECT_EQ(here.UnlinkLlmClusters({remote}, rets, 1000, true), LLM_PARAM_INVALID) << ip;
  }
  EXPECT_EQ(rets, std::vector<Status>{7U});
}

TEST_F(Links, NumbersOfAddresses) {
  const ClusterInfo no_remote{3U, 0, {{kLocalhost, 0}}, {}};
  const ClusterInfo two_remotes{3U, 0, {{kLocalhost, 0}}, {{kLocalhost, port}, {kLocalhost, port}}};
  const ClusterInfo no_local{3U, 0, {}, {{kLocalhost, port}}};
  const ClusterInfo two_locals{3U, 0, {{kLocalhost, 0}, {kLocalhost, 0}}, {{kLocalhost, port}}};
  for (const ClusterInfo &cluster : {no_remote, two_remotes, no_local, two_locals}) {
    EXPECT_EQ(here.LinkLlmClusters({cluster}, rets), LLM_PARAM_INVALID);
    EXPECT_EQ(rets, std::vector<Status>{LLM_PARAM_INVALID});
  }
  EXPECT_EQ(here.UnlinkLlmClusters({no_remote}, rets), LLM_PARAM_INVALID);
  EXPECT_EQ(rets, std::vector<Status>{LLM_PARAM_INVALID});
}

TEST_F(Links, WhoListensNeedsNoLocalAddress) {
  LlmDataDist third(3U, LlmRole::kMix);
  ASSERT_EQ(third.Initialize(Listening(FreePort())), LLM_SUCCESS);
  EXPECT_EQ(third.LinkLlmClusters({ClusterInfo{2U, 0, {}, {{kLocalhost, port}}}}, rets), LLM_SUCCESS);
}

TEST_F(Links, CommResIsLookedAtWhenLinking) {
  LlmDataDist third(3U, LlmRole::kMix);
  Options options = Basic();
  options[OPTION_LOCAL_COMM_RES] = "{\"version\":";
  ASSERT_EQ(third.Initialize(options), LLM_SUCCESS);
  EXPECT_EQ(third.LinkLlmClusters({Peer(2U, port)}, rets), LLM_PARAM_INVALID);
  EXPECT_EQ(rets, std::vector<Status>{LLM_PARAM_INVALID});
  third.Finalize();
  options[OPTION_LOCAL_COMM_RES] = "{\"version\": \"1.3\"}";
  ASSERT_EQ(third.Initialize(options), LLM_SUCCESS);
  EXPECT_EQ(third.LinkLlmClusters({ClusterInfo{2U, 0, {}, {{kLocalhost, port}}}}, rets), LLM_SUCCESS);
}

TEST_F(Links, AlreadyLinked) {
  EXPECT_EQ(here.LinkLlmClusters({Peer(2U, port)}, rets), LLM_ALREADY_LINK);
  EXPECT_EQ(rets, std::vector<Status>{LLM_ALREADY_LINK});
}

TEST_F(Links, NobodyListens) {
  EXPECT_EQ(here.LinkLlmClusters({Peer(3U, FreePort())}, rets), LLM_LINK_FAILED);
  EXPECT_EQ(rets, std::vector<Status>{LLM_LINK_FAILED});
}

TEST_F(Links, SilentPeer) {
  const Socket silent(true);
  EXPECT_EQ(here.LinkLlmClusters({Peer(3U, silent.Port())}, rets, 200), LLM_TIMEOUT);
  EXPECT_EQ(rets, std::vector<Status>{LLM_TIMEOUT});
}

TEST_F(Links, SeveralAtOnceKeepTheirOrderAndStay) {
  const uint16_t third_port = FreePort();
  LlmDataDist third(3U, LlmRole::kMix);
  ASSERT_EQ(third.Initialize(Listening(third_port)), LLM_SUCCESS);
  const std::vector<ClusterInfo> clusters{Peer(2U, port), Peer(4U, FreePort()), Peer(3U, third_port)};
  EXPECT_EQ(here.LinkLlmClusters(clusters, rets, 5000), LLM_LINK_FAILED);
  EXPECT_EQ(rets, (std::vector<Status>{LLM_ALREADY_LINK, LLM_LINK_FAILED, LLM_SUCCESS}));
  EXPECT_EQ(here.UnlinkLlmClusters({Peer(3U, third_port)}, rets), LLM_SUCCESS);
  EXPECT_EQ(rets, std::vector<Status>{LLM_SUCCESS});
}

TEST_F(Links, Unlink) {
  EXPECT_EQ(here.UnlinkLlmClusters({Peer(2U, port)}, rets), LLM_SUCCESS);
  EXPECT_EQ(here.PullKvCache(Theirs(), mine.cache), LLM_NOT_YET_LINK);
  EXPECT_EQ(here.UnlinkLlmClusters({Peer(2U, port)}, rets), LLM_SUCCESS);
  EXPECT_EQ(here.UnlinkLlmClusters({Peer(99U, port)}, rets), LLM_SUCCESS);
  Link();
  EXPECT_EQ(here.PullKvCache(Theirs(), mine.cache), LLM_SUCCESS);
}

TEST_F(Links, UnlinkByForceNeedsNoAddress) {
  EXPECT_EQ(here.UnlinkLlmClusters({ClusterInfo{2U, 0, {}, {}}}, rets, 1000, true), LLM_SUCCESS);
  EXPECT_EQ(rets, std::vector<Status>{LLM_SUCCESS});
  Link();
}

TEST_F(Links, Ipv6) {
  const uint16_t other = FreePort();
  LlmDataDist third(3U, LlmRole::kMix);
  Options options = Basic();
  options[OPTION_LISTEN_IP_INFO] = ("[::1]:" + std::to_string(other)).c_str();
  ASSERT_EQ(third.Initialize(options), LLM_SUCCESS);
  EXPECT_EQ(here.LinkLlmClusters({ClusterInfo{3U, 0, {{"::1", 0}}, {{"::1", other}}}}, rets), LLM_SUCCESS);
}
}  // namespace
