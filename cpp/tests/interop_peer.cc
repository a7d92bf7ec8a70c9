/** A C++ peer that listens for a Python one. It prints its port, waits for a line, and prints its bytes as numbers. */
#include <cstdio>
#include <iostream>

#include "kit.h"

int main() {
  using namespace llm_datadist;  // NOLINT(google-build-using-namespace)
  const uint16_t port = kit::FreePort();
  LlmDataDist dist(1U, LlmRole::kMix);
  kit::Tensors tensors(4U, {8, 16}, 1000);
  if (dist.Initialize(kit::Listening(port)) != LLM_SUCCESS || tensors.Register(dist) != LLM_SUCCESS) {
    return 1;
  }
  std::cout << port << std::endl;
  std::string line;
  (void)std::getline(std::cin, line);
  for (const std::vector<int32_t> &tensor : tensors.memory) {
    for (const int32_t element : tensor) {
      std::cout << element << ' ';
    }
  }
  std::cout << std::endl;
  return dist.UnregisterKvCache(tensors.cache.cache_id) == LLM_SUCCESS ? 0 : 1;
}
