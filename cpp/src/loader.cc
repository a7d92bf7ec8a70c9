#include "loader.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

namespace llm_datadist {
namespace {
constexpr const char kPlugin[] = "libllm_datadist_python.so";

/** The variable of the environment, or what was configured at build time. */
const char *Setting(const char *name, const char *configured) {
  const char *value = std::getenv(name);
  return value == nullptr || value[0] == '\0' ? configured : value;
}

bool LoadPython() {
  if (dlsym(RTLD_DEFAULT, "Py_IsInitialized") != nullptr) {
    return true;
  }
  const char *path = Setting("LLM_DATADIST_LIBPYTHON", LLM_DATADIST_LIBPYTHON);
  if (dlopen(path, RTLD_NOW | RTLD_GLOBAL) != nullptr) {
    return true;
  }
  (void)std::fprintf(stderr, "llm_datadist: cannot load the Python runtime: %s; set LLM_DATADIST_LIBPYTHON\n", dlerror());
  return false;
}

/** The plugin lies beside this library. */
std::string PluginPath() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void *>(&MakeBackend), &info) == 0 || info.dli_fname == nullptr) {
    return kPlugin;
  }
  const std::string own = info.dli_fname;
  const size_t slash = own.rfind('/');
  return slash == std::string::npos ? kPlugin : own.substr(0U, slash + 1U) + kPlugin;
}

CreateBackend Load() {
  static std::mutex mutex;
  static CreateBackend create = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (create != nullptr || !LoadPython()) {
    return create;
  }
  const std::string path = PluginPath();
  void *const plugin = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  void *const symbol = plugin == nullptr ? nullptr : dlsym(plugin, kCreateBackend);
  if (symbol == nullptr) {
    (void)std::fprintf(stderr, "llm_datadist: cannot load %s: %s\n", path.c_str(), dlerror());
    return nullptr;
  }
  create = reinterpret_cast<CreateBackend>(symbol);
  return create;
}
}  // namespace

std::unique_ptr<Backend> MakeBackend(uint64_t cluster_id, LlmRole role) noexcept {
  try {
    const CreateBackend create = Load();
    return std::unique_ptr<Backend>(create == nullptr ? nullptr : create(cluster_id, static_cast<int32_t>(role)));
  } catch (...) {
    return nullptr;
  }
}
}  // namespace llm_datadist
