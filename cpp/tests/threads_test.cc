/** Several threads at once, and many lives of one member. */
#include <fstream>
#include <thread>

#include "kit.h"

namespace {
using namespace kit;  // NOLINT(google-build-using-namespace)
using namespace llm_datadist;  // NOLINT(google-build-using-namespace)

class Threads : public Pair {};

TEST_F(Threads, EightCallAtOnce) {
  std::vector<std::thread> threads;
  std::vector<size_t> wrong(8U, 0U);
  for (size_t thread = 0U; thread < 8U; ++thread) {
    threads.emplace_back([this, thread, &wrong] {
      const uint32_t row = static_cast<uint32_t>(thread);
      for (int round = 0; round < 200; ++round) {
        const bool pull = (thread + static_cast<size_t>(round)) % 2U == 0U;
        const Status status = pull ? here.PullKvBlocks(Theirs(), mine.cache, {row}, {row})
                                   : here.PushKvCache(mine.cache, Theirs(row), row);
        wrong[thread] += status == LLM_SUCCESS && mine.Row(3U, row) == theirs.Row(3U, row) ? 0U : 1U;
        Tensors own(2U, {2, 2}, 0);
        wrong[thread] += own.Register(here) == LLM_SUCCESS ? 0U : 1U;
        wrong[thread] += here.UnregisterKvCache(own.cache.cache_id) == LLM_SUCCESS ? 0U : 1U;
      }
    });
  }
  for (std::thread &thread : threads) {
    thread.join();
  }
  EXPECT_EQ(wrong, std::vector<size_t>(8U, 0U));
}

TEST(Lives, EightThreadsInitializeAtOnce) {
  std::vector<std::thread> threads;
  std::vector<Status> results(8U, LLM_FAILED);
  for (size_t i = 0U; i < 8U; ++i) {
    threads.emplace_back([i, &results] {
      LlmDataDist dist(i, LlmRole::kMix);
      results[i] = dist.Initialize(Basic());
    });
  }
  for (std::thread &thread : threads) {
    thread.join();
  }
  EXPECT_EQ(results, std::vector<Status>(8U, LLM_SUCCESS));
}

TEST(Lives, EightThreadsInitializeTheSameOne) {
  LlmDataDist dist(1U, LlmRole::kMix);
  std::vector<std::thread> threads;
  std::vector<Status> results(8U, LLM_FAILED);
  for (size_t i = 0U; i < 8U; ++i) {
    threads.emplace_back([i, &dist, &results] { results[i] = dist.Initialize(Basic()); });
  }
  for (std::thread &thread : threads) {
    thread.join();
  }
  EXPECT_EQ(results, std::vector<Status>(8U, LLM_SUCCESS));
}

/** Never finalized: destroyed when the process ends. */
TEST(Lives, UntilTheEndOfTheProcess) {
  static LlmDataDist dist(1U, LlmRole::kMix);
  EXPECT_EQ(dist.Initialize(Listening(FreePort())), LLM_SUCCESS);
}

size_t ResidentKib() {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.rfind("VmRSS:", 0U) == 0U) {
      return std::stoul(line.substr(6U));
    }
  }
  return 0U;
}

size_t OpenFiles() {
  size_t count = 0U;
  for (int fd = 0; fd < 4096; ++fd) {
    count += access(("/proc/self/fd/" + std::to_string(fd)).c_str(), F_OK) == 0 ? 1U : 0U;
  }
  return count;
}

TEST(Lives, AThousandDoNotGrow) {
  constexpr int kWarmUp = 100;
  constexpr int kCycles = 1000;
  size_t memory = 0U;
  size_t files = 0U;
  for (int cycle = 0; cycle < kWarmUp + kCycles; ++cycle) {
    if (cycle == kWarmUp) {
      memory = ResidentKib();
      files = OpenFiles();
    }
    LlmDataDist dist(1U, LlmRole::kMix);
    Tensors tensors(2U, {2, 2}, 0);
    ASSERT_EQ(dist.Initialize(Listening(FreePort())), LLM_SUCCESS);
    ASSERT_EQ(tensors.Register(dist), LLM_SUCCESS);
    dist.Finalize();
  }
  EXPECT_EQ(OpenFiles(), files);
  EXPECT_LT(ResidentKib(), memory + 2048U) << "KiB, after " << memory;
  RecordProperty("grown_kib", static_cast<int>(ResidentKib()) - static_cast<int>(memory));
}
}  // namespace
