/**
 * @file python_backend.cc
 * @brief The plugin: calls llm_datadist.native.NativeEngine.
 */
#include <pybind11/pybind11.h>

#include <cstdio>
#include <new>
#include <utility>

#include "backend.h"
#include "python_runtime.h"

namespace llm_datadist {
namespace {
namespace py = pybind11;

py::str Text(const AscendString &text) {
  return py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(
      text.GetString(), static_cast<Py_ssize_t>(text.GetLength()), "surrogateescape"));
}

py::dict Options(const std::map<AscendString, AscendString> &options) {
  py::dict result;
  for (const auto &option : options) {
    result[Text(option.first)] = Text(option.second);
  }
  return result;
}

template <typename T>
py::list List(const std::vector<T> &values) {
  py::list result(values.size());
  for (size_t i = 0U; i < values.size(); ++i) {
    result[i] = py::int_(values[i]);
  }
  return result;
}

/** A view without a copy: only for the time of the call. */
py::object Blocks(const std::vector<uint64_t> &blocks) {
  static const uint64_t nothing = 0U;
  const uint64_t *data = blocks.empty() ? &nothing : blocks.data();
  return py::memoryview::from_memory(data, static_cast<py::ssize_t>(blocks.size() * sizeof(uint64_t)));
}

py::list Addresses(const std::vector<IpInfo> &infos) {
  py::list result;
  for (const IpInfo &info : infos) {
    result.append(py::make_tuple(Text(info.ip), info.port));
  }
  return result;
}

py::list Clusters(const std::vector<ClusterInfo> &clusters) {
  py::list result;
  for (const ClusterInfo &cluster : clusters) {
    result.append(py::make_tuple(cluster.remote_cluster_id, Addresses(cluster.local_ip_infos),
                                 Addresses(cluster.remote_ip_infos)));
  }
  return result;
}

py::tuple Index(const CacheIndex &index) {
  return py::make_tuple(index.cluster_id, index.cache_id, index.batch_index);
}

py::tuple Range(const std::pair<int32_t, int32_t> &range) { return py::make_tuple(range.first, range.second); }

Status Code(const py::handle &result) { return result.cast<Status>(); }

Status Results(const py::object &result, std::vector<Status> &rets) {
  const py::tuple both = result;
  const py::object each = both[1];
  if (!each.is_none()) {
    std::vector<Status> codes;
    for (const py::handle code : each) {
      codes.push_back(Code(code));
    }
    rets = std::move(codes);
  }
  return Code(both[0]);
}

/** Runs a call under the interpreter's lock; whatever goes wrong is LLM_FAILED. */
template <typename Work>
Status Guarded(Work work) noexcept {
  try {
    const Gil gil;
    if (!gil) {
      return LLM_FAILED;
    }
    try {
      return work();
    } catch (py::error_already_set &error) {
      error.discard_as_unraisable("llm_datadist");
    } catch (const std::exception &error) {
      (void)std::fprintf(stderr, "llm_datadist: %s\n", error.what());
    }
  } catch (...) {
  }
  return LLM_FAILED;
}

class PythonBackend : public Backend {
 public:
  /** With the interpreter's lock held. */
  PythonBackend(uint64_t cluster_id, int32_t role)
      : engine_(py::module_::import("llm_datadist.native").attr("NativeEngine")(cluster_id, role)) {}

  ~PythonBackend() override {
    const Gil gil;
    if (gil) {
      PythonBackend::Finalize();
      engine_ = py::object();
    } else {
      (void)engine_.release();
    }
  }

  Status Initialize(const std::map<AscendString, AscendString> &options) noexcept override {
    return Guarded([&] { return Code(engine_.attr("initialize")(Options(options))); });
  }

  void Finalize() noexcept override {
    (void)Guarded([&] {
      engine_.attr("finalize")();
      return LLM_SUCCESS;
    });
  }

  Status SetRole(LlmRole role, const std::map<AscendString, AscendString> &options) noexcept override {
    return Guarded([&] { return Code(engine_.attr("set_role")(static_cast<int32_t>(role), Options(options))); });
  }

  Status Link(const std::vector<ClusterInfo> &clusters, std::vector<Status> &rets,
              int32_t timeout_ms) noexcept override {
    return Guarded([&] { return Results(engine_.attr("link")(Clusters(clusters), timeout_ms), rets); });
  }

  Status Unlink(const std::vector<ClusterInfo> &clusters, std::vector<Status> &rets, int32_t timeout_ms,
                bool force) noexcept override {
    return Guarded([&] { return Results(engine_.attr("unlink")(Clusters(clusters), timeout_ms, force), rets); });
  }

  Status Allocate(const CacheDesc &desc, Cache &cache) noexcept override {
    return Guarded([&] {
      const py::tuple result = engine_.attr("allocate")(static_cast<uint32_t>(desc.placement), desc.num_tensors,
                                                        static_cast<int32_t>(desc.data_type), List(desc.shape));
      const Status status = Code(result[0]);
      if (status == LLM_SUCCESS) {
        std::vector<uintptr_t> addrs;
        for (const py::handle addr : py::object(result[2])) {
          addrs.push_back(addr.cast<uintptr_t>());
        }
        CacheDesc copy = desc;
        cache.cache_id = result[1].cast<int64_t>();
        cache.tensor_addrs = std::move(addrs);
        cache.cache_desc = std::move(copy);
      }
      return status;
    });
  }

  Status Deallocate(int64_t cache_id) noexcept override {
    return Guarded([&] { return Code(engine_.attr("deallocate")(cache_id)); });
  }

  Status PullCache(const CacheIndex &source, int64_t cache_id, uint32_t batch_index, int64_t size,
                   const KvCacheExtParam &ext_param) noexcept override {
    return Guarded([&] {
      return Code(engine_.attr("pull_cache")(Index(source), cache_id, batch_index, size,
                                             Range(ext_param.src_layer_range), Range(ext_param.dst_layer_range),
                                             ext_param.tensor_num_per_layer));
    });
  }

  Status PullBlocks(const CacheIndex &source, int64_t cache_id, const std::vector<uint64_t> &src_blocks,
                    const std::vector<uint64_t> &dst_blocks, const KvCacheExtParam &ext_param) noexcept override {
    return Guarded([&] {
      return Code(engine_.attr("pull_blocks")(Index(source), cache_id, Blocks(src_blocks), Blocks(dst_blocks),
                                              Range(ext_param.src_layer_range), Range(ext_param.dst_layer_range),
                                              ext_param.tensor_num_per_layer));
    });
  }

  Status PushCache(int64_t cache_id, const CacheIndex &target, uint32_t batch_index, int64_t size,
                   const KvCacheExtParam &ext_param) noexcept override {
    return Guarded([&] {
      return Code(engine_.attr("push_cache")(cache_id, Index(target), batch_index, size,
                                             Range(ext_param.src_layer_range), Range(ext_param.dst_layer_range),
                                             ext_param.tensor_num_per_layer));
    });
  }

  Status PushBlocks(int64_t cache_id, const CacheIndex &target, const std::vector<uint64_t> &src_blocks,
                    const std::vector<uint64_t> &dst_blocks, const KvCacheExtParam &ext_param) noexcept override {
    return Guarded([&] {
      return Code(engine_.attr("push_blocks")(cache_id, Index(target), Blocks(src_blocks), Blocks(dst_blocks),
                                              Range(ext_param.src_layer_range), Range(ext_param.dst_layer_range),
                                              ext_param.tensor_num_per_layer));
    });
  }

  Status CopyCache(int64_t src_id, int64_t dst_id, uint32_t src_batch, uint32_t dst_batch, uint64_t offset,
                   int64_t size) noexcept override {
    return Guarded(
        [&] { return Code(engine_.attr("copy_cache")(src_id, dst_id, src_batch, dst_batch, offset, size)); });
  }

  Status CopyBlocks(int64_t src_id, int64_t dst_id, const std::vector<uint64_t> &src_blocks,
                    const std::vector<std::vector<uint64_t>> &dst_blocks_list) noexcept override {
    return Guarded([&] {
      py::list targets;
      for (const std::vector<uint64_t> &blocks : dst_blocks_list) {
        targets.append(List(blocks));
      }
      return Code(engine_.attr("copy_blocks")(src_id, dst_id, List(src_blocks), targets));
    });
  }

  Status Register(const CacheDesc &desc, const std::vector<uint64_t> &addrs, int64_t &cache_id) noexcept override {
    return Guarded([&] {
      const py::tuple result =
          engine_.attr("register")(static_cast<uint32_t>(desc.placement), desc.num_tensors,
                                   static_cast<int32_t>(desc.data_type), List(desc.shape), List(addrs));
      const Status status = Code(result[0]);
      if (status == LLM_SUCCESS) {
        cache_id = result[1].cast<int64_t>();
      }
      return status;
    });
  }

  Status Unregister(int64_t cache_id) noexcept override {
    return Guarded([&] { return Code(engine_.attr("unregister")(cache_id)); });
  }

 private:
  py::object engine_;
};
}  // namespace
}  // namespace llm_datadist

extern "C" __attribute__((visibility("default"))) llm_datadist::Backend *LlmDatadistCreateBackend1(
    uint64_t cluster_id, int32_t role) {
  if (!llm_datadist::StartPython()) {
    return nullptr;
  }
  llm_datadist::Backend *backend = nullptr;
  const llm_datadist::Status status = llm_datadist::Guarded([&] {
    backend = new llm_datadist::PythonBackend(cluster_id, role);
    return llm_datadist::LLM_SUCCESS;
  });
  if (status != llm_datadist::LLM_SUCCESS) {
    (void)std::fprintf(stderr,
                       "llm_datadist: cannot import llm_datadist.native: set LLM_DATADIST_PYTHON to the python of an "
                       "environment that has the package llm-datadist\n");
  }
  return backend;
}
