/** Prefill: computes layer after layer and pushes each one to decode as soon as it is ready. Argument: decode's port. */
#include "kv_cache.h"

int main(int argc, char **argv) {
  using namespace llm_datadist;  // NOLINT(google-build-using-namespace)
  if (argc != 2) {
    (void)std::fprintf(stderr, "usage: %s PORT\n", argv[0]);
    return 2;
  }
  LlmDataDist datadist(1U, LlmRole::kPrompt);
  example::Check(datadist.Initialize({{OPTION_DEVICE_ID, "0"}}), "Initialize");
  example::KvCache kv;
  const Cache cache = kv.Register(datadist);
  const auto decode = example::Peer(2U, argv[1]);
  std::vector<Status> rets;
  example::Check(datadist.LinkLlmClusters(decode, rets, 5000), "LinkLlmClusters");

  // The first cache that a process registers has the id 1.
  const CacheIndex remote{2U, 1, 0U, {}};
  for (int32_t layer = 0; layer < example::kLayers; ++layer) {
    for (size_t tensor = 2U * static_cast<size_t>(layer); tensor < 2U * static_cast<size_t>(layer) + 2U; ++tensor) {
      std::vector<int32_t> values(example::kElements);
      for (size_t i = 0U; i < values.size(); ++i) {
        values[i] = example::Value(tensor, i);
      }
      kv.Write(tensor, values);
    }
    const KvCacheExtParam only{{layer, layer}, {layer, layer}, 2U, {}};
    example::Check(datadist.PushKvBlocks(cache, remote, {5U, 6U, 7U}, {1U, 2U, 3U}, only), "PushKvBlocks");
  }
  example::Check(datadist.UnlinkLlmClusters(decode, rets, 5000), "UnlinkLlmClusters");
  example::Check(datadist.UnregisterKvCache(cache.cache_id), "UnregisterKvCache");
  datadist.Finalize();
  (void)std::printf("prefill: pushed %d layers\n", example::kLayers);
  return 0;
}
