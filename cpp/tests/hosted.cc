/** For a process that runs Python: a member that a Python program loads with ctypes. Cluster 1; the peer is cluster 2. */
#include <algorithm>
#include <chrono>

#include "kit.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {
llm_datadist::LlmDataDist *member = nullptr;
kit::Tensors *tensors = nullptr;
}  // namespace

/** Initialize, register, link; the first status that is no success. */
EXPORTED uint32_t HostedOpen(uint16_t port) {
  member = new llm_datadist::LlmDataDist(1U, llm_datadist::LlmRole::kMix);
  tensors = new kit::Tensors(4U, {8, 16}, kit::Tensors::kNothing);
  std::vector<llm_datadist::Status> rets;
  llm_datadist::Status status = member->Initialize(kit::Basic());
  if (status == llm_datadist::LLM_SUCCESS) {
    status = tensors->Register(*member);
  }
  return status == llm_datadist::LLM_SUCCESS ? member->LinkLlmClusters({kit::Peer(2U, port)}, rets, 5000) : status;
}

/** One pull of block 3 to block 0. */
EXPORTED uint32_t HostedPull() { return member->PullKvBlocks({2U, 1, 0U, {}}, tensors->cache, {3U}, {0U}); }

/** An element of tensor 2. */
EXPORTED int32_t HostedElement(uint32_t index) { return tensors->memory[2][index]; }

/** Median time of a pull in microseconds. */
EXPORTED double HostedMedian(uint32_t calls) {
  std::vector<double> times;
  for (uint32_t call = 0U; call < calls; ++call) {
    const auto start = std::chrono::steady_clock::now();
    if (HostedPull() != llm_datadist::LLM_SUCCESS) {
      return -1.0;
    }
    times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2U];
}

EXPORTED void HostedClose() {
  delete member;
  delete tensors;
}
