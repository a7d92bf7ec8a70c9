/** Decode: pulls blocks and a batch entry from prefill and looks at every byte. Argument: prefill's port. */
#include "kv_cache.h"

int main(int argc, char **argv) {
  using namespace llm_datadist;  // NOLINT(google-build-using-namespace)
  if (argc != 2) {
    (void)std::fprintf(stderr, "usage: %s PORT\n", argv[0]);
    return 2;
  }
  LlmDataDist datadist(1U, LlmRole::kDecoder);
  example::Check(datadist.Initialize({{OPTION_DEVICE_ID, "0"}}), "Initialize");
  example::KvCache kv;
  const Cache cache = kv.Register(datadist);
  const auto prefill = example::Peer(2U, argv[1]);
  std::vector<Status> rets;
  example::Check(datadist.LinkLlmClusters(prefill, rets, 5000), "LinkLlmClusters");

  // The peer's first cache has blocks, its second one batch entries.
  example::Check(datadist.PullKvBlocks({2U, 1, 0U, {}}, cache, {1U, 2U, 3U}, {4U, 5U, 6U}), "PullKvBlocks");
  example::Check(datadist.PullKvCache({2U, 2, 7U, {}}, cache, 0U), "PullKvCache");
  const std::vector<int64_t> sources = {7, -1, -1, -1, 1, 2, 3, -1};
  for (size_t tensor = 0U; tensor < example::kTensors; ++tensor) {
    const std::vector<int32_t> values = kv.Read(tensor);
    for (size_t i = 0U; i < values.size(); ++i) {
      const int64_t source = sources[i / example::kWidth];
      const size_t element = static_cast<size_t>(source * example::kWidth) + i % example::kWidth;
      const int32_t expected = source < 0 ? -1 : example::Value(tensor, element);
      example::Check(values[i] == expected, "comparing tensor " + std::to_string(tensor));
    }
  }
  example::Check(datadist.UnlinkLlmClusters(prefill, rets, 5000), "UnlinkLlmClusters");
  example::Check(datadist.UnregisterKvCache(cache.cache_id), "UnregisterKvCache");
  datadist.Finalize();
  (void)std::printf("decode: every byte is as prefill wrote it\n");
  return 0;
}
