/**
 * @file llm_datadist.h
 * @brief LLM-DataDist: KV-cache transfer between the processes of an LLM service.
 *
 * Each process has one or more LlmDataDist. It initializes, registers its caches, links to its peers, and then pulls
 * from their caches or pushes into them. Every call returns a Status; no exception leaves the library. The reason of a
 * failure is logged (environment variable ASCEND_GLOBAL_LOG_LEVEL: 0 debug, 1 info, 2 warning, 3 error).
 *
 * Thread safety: after Initialize all calls may be made from several threads at once, except Finalize and the
 * destructor. No lock is held while bytes move.
 */
#ifndef LLM_DATADIST_LLM_DATADIST_H_
#define LLM_DATADIST_LLM_DATADIST_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "external/ge_common/api_error_codes.h"

namespace llm_datadist {
using Status = ge::Status;
using AscendString = ge::AscendString;
using DataType = ge::DataType;

/** @name Options of Initialize
 *  Keys that are not known are ignored.
 *  @{ */
/** "ip:port" or "[ipv6]:port" to listen on; without it this side only links to others. Also an option of SetRole. */
constexpr const char OPTION_LISTEN_IP_INFO[] = "llm.ListenIpInfo";
/** Mandatory: one device number, "0" on machines without accelerators. */
constexpr const char OPTION_DEVICE_ID[] = "llm.DeviceId";
/** Timeout of one pull or push in milliseconds; "1000" without it. */
constexpr const char OPTION_SYNC_CACHE_WAIT_TIME[] = "llm.SyncKvCacheWaitTime";
/** Accepted, not used. */
constexpr const char OPTION_BUF_POOL_CFG[] = "llm.BufPoolCfg";
/** Accepted, not used: SetRole is always enabled. */
constexpr const char OPTION_ENABLE_SET_ROLE[] = "llm.EnableSwitchRole";
/** JSON description of this side's endpoints; with it, links need no local address. */
constexpr const char OPTION_LOCAL_COMM_RES[] = "llm.LocalCommRes";
/** "hixl", or leave it out. */
constexpr const char OPTION_TRANSFER_BACKEND[] = "llm.TransferBackend";
/** JSON object for the transfer backend "hixl"; not used otherwise. */
constexpr const char OPTION_GLOBAL_RESOURCE_CONFIG[] = "llm.GlobalResourceConfig";
/** @} */

/** @name Statuses
 *  @{ */
constexpr Status LLM_SUCCESS = 0x0U;
constexpr Status LLM_FAILED = 0xFFFFFFFFU;
constexpr Status LLM_WAIT_PROC_TIMEOUT = 0x5010B001U;
constexpr Status LLM_KV_CACHE_NOT_EXIST = 0x5010B002U;
constexpr Status LLM_PARAM_INVALID = 0x5010B005U;
constexpr Status LLM_NOT_YET_LINK = 0x5010B007U;
constexpr Status LLM_ALREADY_LINK = 0x5010B008U;
constexpr Status LLM_LINK_FAILED = 0x5010B009U;
constexpr Status LLM_UNLINK_FAILED = 0x5010B00AU;
constexpr Status LLM_NOTIFY_PROMPT_UNLINK_FAILED = 0x5010B00BU;
constexpr Status LLM_CLUSTER_NUM_EXCEED_LIMIT = 0x5010B00CU;
constexpr Status LLM_PROCESSING_LINK = 0x5010B00DU;
constexpr Status LLM_DEVICE_OUT_OF_MEMORY = 0x5010B00EU;
constexpr Status LLM_EXIST_LINK = 0x5010B018U;
constexpr Status LLM_FEATURE_NOT_ENABLED = 0x5010B019U;
constexpr Status LLM_TIMEOUT = 0x5010B01AU;
constexpr Status LLM_LINK_BUSY = 0x5010B01BU;
constexpr Status LLM_OUT_OF_MEMORY = 0x5010B01CU;
/** @} */

/** @name Data types
 *  @{ */
using ge::DT_BF16;
using ge::DT_BOOL;
using ge::DT_COMPLEX128;
using ge::DT_COMPLEX32;
using ge::DT_COMPLEX64;
using ge::DT_DOUBLE;
using ge::DT_DUAL;
using ge::DT_DUAL_SUB_INT8;
using ge::DT_DUAL_SUB_UINT8;
using ge::DT_FLOAT;
using ge::DT_FLOAT16;
using ge::DT_FLOAT4_E1M2;
using ge::DT_FLOAT4_E2M1;
using ge::DT_FLOAT6_E2M3;
using ge::DT_FLOAT6_E3M2;
using ge::DT_FLOAT8_E4M3FN;
using ge::DT_FLOAT8_E5M2;
using ge::DT_FLOAT8_E8M0;
using ge::DT_HIFLOAT8;
using ge::DT_INT16;
using ge::DT_INT2;
using ge::DT_INT32;
using ge::DT_INT4;
using ge::DT_INT64;
using ge::DT_INT8;
using ge::DT_QINT16;
using ge::DT_QINT32;
using ge::DT_QINT8;
using ge::DT_QUINT16;
using ge::DT_QUINT8;
using ge::DT_RESOURCE;
using ge::DT_STRING;
using ge::DT_STRING_REF;
using ge::DT_UINT1;
using ge::DT_UINT16;
using ge::DT_UINT2;
using ge::DT_UINT32;
using ge::DT_UINT64;
using ge::DT_UINT8;
using ge::DT_UNDEFINED;
using ge::DT_VARIANT;
/** @} */

namespace {
constexpr uint8_t kDefaultTensorNumPerLayer = 2U;
}  // namespace

/** An address: an IPv4 or IPv6 literal and a port. */
struct IpInfo {
  AscendString ip;
  uint16_t port = 0U;
  uint8_t reserved[128] = {};
};

/** A peer, for LinkLlmClusters and UnlinkLlmClusters. */
struct ClusterInfo {
  uint64_t remote_cluster_id = 0U;     /**< id of the peer */
  int32_t remote_role_type = 0;        /**< 0 prompt, 1 decoder; not used */
  std::vector<IpInfo> local_ip_infos;  /**< one address of this side, unless it listens or has llm.LocalCommRes */
  std::vector<IpInfo> remote_ip_infos; /**< the one address that the peer listens on */
  uint8_t reserved[128] = {};
};

/** What a process does; transfers work the same way in every role. */
enum class LlmRole : int32_t { kPrompt = 1, kDecoder = 2, kMix = 3, kEnd };

/** Names a cache, and a batch entry in it, at a peer. */
struct CacheIndex {
  uint64_t cluster_id;  /**< id of the peer */
  int64_t cache_id;     /**< what RegisterKvCache returned there; the first one of a process is 1 */
  uint32_t batch_index; /**< batch entry; 0 where blocks are named */
  uint8_t reserved[128] = {};
};

/** Where memory is. */
enum class CachePlacement : uint32_t { kHost = 0U, kDevice = 1U };

/** The geometry of a cache: equal tensors. */
struct CacheDesc {
  CachePlacement placement = CachePlacement::kDevice;
  uint32_t num_tensors = 0U;
  DataType data_type = DT_UNDEFINED;
  std::vector<int64_t> shape; /**< of each tensor; dimension 0 counts batch entries or blocks */
  uint8_t reserved[128] = {};
};

/** A local cache. Pulls and pushes look at cache_id alone; the rest is what was registered under it. */
struct Cache {
  int64_t cache_id = -1;
  std::vector<uintptr_t> tensor_addrs;
  CacheDesc cache_desc;
  uint8_t reserved[128] = {};
};

/**
 * @brief Layers of a pull or push.
 *
 * Ranges include both ends and count from 0; layer i is the tensors [i * tensor_num_per_layer, (i + 1) *
 * tensor_num_per_layer). A range whose first is -1 is not given: then it is the other one, and without both, all
 * layers take part.
 */
struct KvCacheExtParam {
  std::pair<int32_t, int32_t> src_layer_range = {-1, -1};
  std::pair<int32_t, int32_t> dst_layer_range = {-1, -1};
  uint8_t tensor_num_per_layer = kDefaultTensorNumPerLayer; /**< 1 or more; divides the number of tensors */
  uint8_t reserved[127] = {};
};

/** Reserved. */
struct RegisterCfg {
  uint8_t reserved[128] = {0};
};

/**
 * @brief One member of the transfer layer. A process may have several.
 *
 * Every call returns LLM_FAILED before Initialize and after Finalize, if not said otherwise.
 */
class ASCEND_FUNC_VISIBILITY LlmDataDist {
 public:
  /**
   * @param [in] cluster_id unique among the processes that link to each other
   * @param [in] role what the process does
   */
  LlmDataDist(uint64_t cluster_id, LlmRole role);

  /** Does Finalize if that was forgotten. */
  ~LlmDataDist();

  LlmDataDist(const LlmDataDist &) = delete;
  LlmDataDist &operator=(const LlmDataDist &) = delete;

  /**
   * @brief Start: listen if asked to.
   *
   * Does nothing when already initialized. After a failure it may be tried again. Ignores SIGPIPE in the whole process
   * if the program has not set it.
   *
   * @param [in] options OPTION_DEVICE_ID is mandatory. Besides the OPTION_ constants: "llm.MemPoolConfig" and
   *   "llm.HostMemPoolConfig", {"memory_size": bytes, "page_shift": 16}, pools for AllocateCache; "llm.Paths", a comma
   *   list of transfer paths in order of preference; "llm.MaxRegisteredAddrs", 240 without it; "llm.HugePages", "0" to
   *   leave the memory of caches in the pages it has; "llm.StrictConstraints", "1" to make documented constraints of the
   *   original errors (docs/compatibility.md); "llm.VerifyTransfers", "1" to compare the bytes of both sides after each
   *   transfer; for links between hosts "llm.SecretFile" (or "llm.Secret"), "llm.TlsCert", "llm.TlsKey" and "llm.TlsCa", or
   *   "llm.AllowInsecureRemote", "1" (see SECURITY.md).
   * @retval LLM_SUCCESS
   * @retval LLM_PARAM_INVALID wrong role or option
   * @retval LLM_OUT_OF_MEMORY no memory for a pool
   * @retval LLM_FAILED the listener cannot be bound, or the Python runtime cannot be loaded
   * @note May be called from any thread.
   */
  Status Initialize(const std::map<AscendString, AscendString> &options);

  /**
   * @brief Stop: end all links, forget all caches, free the pools. Takes bounded time; idempotent.
   *
   * No transfer touches registered memory any more when it returns. Initialize may follow.
   * @note Not to be called while other calls run.
   */
  void Finalize();

  /**
   * @brief Take another role, or the same one: listen where the options say, or stop listening if they do not.
   * @param [in] role new role
   * @param [in] options may hold OPTION_LISTEN_IP_INFO; other keys are ignored
   * @retval LLM_SUCCESS
   * @retval LLM_PARAM_INVALID wrong role or address
   * @retval LLM_EXIST_LINK there are links
   * @retval LLM_FEATURE_NOT_ENABLED another address with the transfer backend hixl
   * @retval LLM_FAILED not initialized, or the listener cannot be bound
   * @note May be called from any thread.
   */
  Status SetRole(LlmRole role, const std::map<AscendString, AscendString> &options = {});

  /**
   * @brief Link to peers that listen, all at once. A link works in both directions.
   * @param [in] clusters peers, each with one remote address
   * @param [out] rets one status per peer, in order; left alone where the call as a whole is refused
   * @param [in] timeout_in_millis for all of them, at least 1
   * @retval LLM_SUCCESS all are linked
   * @retval LLM_PARAM_INVALID no cluster, a timeout below 1, an address that is no IPv4 or IPv6 literal; in rets: not
   *   exactly one remote address, no local one where it is needed, or modes that do not fit
   * @retval LLM_ALREADY_LINK linked already
   * @retval LLM_LINK_FAILED nobody listens there
   * @retval LLM_TIMEOUT the peer did not answer in time
   * @retval LLM_FAILED not initialized, or the handshake failed
   * @return otherwise the last status in rets that is no success; what is linked stays linked
   * @note May be called from any thread.
   */
  Status LinkLlmClusters(const std::vector<ClusterInfo> &clusters, std::vector<Status> &rets,
                         int32_t timeout_in_millis = 1000);

  /**
   * @brief End links. A peer that is not linked is a success.
   * @param [in] clusters peers, each with one remote address; with force_flag without one, too
   * @param [out] rets as for LinkLlmClusters
   * @param [in] timeout_in_millis for all of them, at least 1
   * @param [in] force_flag end this side alone, without asking the peer
   * @retval LLM_SUCCESS
   * @retval LLM_PARAM_INVALID as for LinkLlmClusters
   * @retval LLM_UNLINK_FAILED the peer cannot be told; use force_flag
   * @retval LLM_TIMEOUT running transfers or the peer took too long; the link is kept
   * @retval LLM_FAILED not initialized
   * @note May be called from any thread.
   */
  Status UnlinkLlmClusters(const std::vector<ClusterInfo> &clusters, std::vector<Status> &rets,
                           int32_t timeout_in_millis = 1000, bool force_flag = false);

  /**
   * @brief Make a cache of pool memory.
   * @param [in] cache_desc geometry; its placement chooses the pool
   * @param [out] cache id, addresses and geometry; left alone on failure
   * @retval LLM_SUCCESS
   * @retval LLM_FEATURE_NOT_ENABLED no pool is configured
   * @retval LLM_PARAM_INVALID wrong geometry, or no pool for this placement
   * @retval LLM_OUT_OF_MEMORY the pool is exhausted
   * @note May be called from any thread.
   */
  Status AllocateCache(const CacheDesc &cache_desc, Cache &cache);

  /**
   * @brief Give the memory of an allocated cache back. Unknown and registered ids are left alone: a success.
   * @param [in] cache_id from AllocateCache
   * @retval LLM_SUCCESS
   * @retval LLM_FEATURE_NOT_ENABLED no pool is configured
   * @retval LLM_LINK_BUSY transfers still use it; call again
   * @note May be called from any thread.
   */
  Status DeallocateCache(int64_t cache_id);

  /**
   * @brief Copy a batch entry of a peer's cache into a batch entry of a local one, in each tensor.
   * @param [in] src_cache_index the peer's batch entry
   * @param [in] dst_cache the local cache; only cache_id is looked at
   * @param [in] batch_index the local batch entry
   * @param [in] size bytes per tensor; -1 is a whole local batch entry
   * @param [in] ext_param layers
   * @retval LLM_SUCCESS the bytes are in place
   * @retval LLM_PARAM_INVALID size 0 or below -1, wrong layers, own cluster id, or sizes that do not fit at one end
   * @retval LLM_KV_CACHE_NOT_EXIST no such cache at one end, or no such batch entry at the peer
   * @retval LLM_NOT_YET_LINK no link to the peer
   * @retval LLM_TIMEOUT not done in time
   * @retval LLM_FAILED not initialized, or the transfer failed
   * @note May be called from any thread.
   */
  Status PullKvCache(const CacheIndex &src_cache_index, const Cache &dst_cache, uint32_t batch_index = 0U,
                     int64_t size = -1, const KvCacheExtParam &ext_param = {});

  /**
   * @brief Copy blocks of a peer's cache into blocks of a local one, in each tensor.
   * @param [in] src_cache_index the peer's cache; batch_index must be 0
   * @param [in] dst_cache the local cache; only cache_id is looked at
   * @param [in] src_blocks blocks of the peer
   * @param [in] dst_blocks local blocks, as many; of two pairs with one destination the last counts
   * @param [in] ext_param layers
   * @retval LLM_SUCCESS the bytes are in place
   * @retval LLM_PARAM_INVALID lists that are empty, differ in length or leave a cache, block sizes that differ, and as
   *   for PullKvCache
   * @retval LLM_KV_CACHE_NOT_EXIST no such cache at one end
   * @retval LLM_NOT_YET_LINK no link to the peer
   * @retval LLM_TIMEOUT not done in time
   * @retval LLM_FAILED not initialized, or the transfer failed
   * @note May be called from any thread.
   */
  Status PullKvBlocks(const CacheIndex &src_cache_index, const Cache &dst_cache,
                      const std::vector<uint64_t> &src_blocks, const std::vector<uint64_t> &dst_blocks,
                      const KvCacheExtParam &ext_param = {});

  /**
   * @brief Copy a batch entry, or a part of it, between local caches, in each tensor.
   * @param [in] src_cache source; only cache_id is looked at
   * @param [in] dst_cache target; only cache_id is looked at
   * @param [in] src_batch_index source batch entry
   * @param [in] dst_batch_index target batch entry
   * @param [in] offset bytes to leave out at the start of both
   * @param [in] size bytes per tensor; -1 is to the end of the source entry
   * @retval LLM_SUCCESS
   * @retval LLM_FEATURE_NOT_ENABLED no pool is configured
   * @retval LLM_KV_CACHE_NOT_EXIST no such cache
   * @retval LLM_PARAM_INVALID numbers of tensors that differ, or a part outside an entry
   * @retval LLM_FAILED memory is not mapped
   * @note May be called from any thread.
   */
  Status CopyKvCache(const Cache &src_cache, const Cache &dst_cache, uint32_t src_batch_index = 0U,
                     uint32_t dst_batch_index = 0U, uint64_t offset = 0U, int64_t size = -1);

  /**
   * @brief Copy blocks between local caches, in each tensor.
   * @param [in] src_cache source; only cache_id is looked at
   * @param [in] dst_cache target; only cache_id is looked at
   * @param [in] src_blocks source blocks
   * @param [in] dst_blocks_list for each source block, its targets
   * @retval LLM_SUCCESS
   * @retval LLM_FEATURE_NOT_ENABLED no pool is configured
   * @retval LLM_KV_CACHE_NOT_EXIST no such cache
   * @retval LLM_PARAM_INVALID lists that differ in length, numbers of tensors that differ, or a block outside a cache
   * @retval LLM_FAILED block sizes differ, or memory is not mapped
   * @note May be called from any thread.
   */
  Status CopyKvBlocks(const Cache &src_cache, const Cache &dst_cache, const std::vector<uint64_t> &src_blocks,
                      const std::vector<std::vector<uint64_t>> &dst_blocks_list);

  /**
   * @brief Copy a batch entry of a local cache into a batch entry of a peer's cache, in each tensor.
   * @param [in] src_cache the local cache, on kDevice; only cache_id is looked at
   * @param [in] dst_cache_index the peer's batch entry
   * @param [in] src_batch_index the local batch entry
   * @param [in] size only -1, a whole batch entry
   * @param [in] ext_param layers; both ranges must span as many
   * @retval LLM_SUCCESS the bytes are in place at the peer
   * @retval LLM_PARAM_INVALID another size, wrong layers, a cache registered as kHost, or sizes that do not fit at one
   *   end
   * @retval LLM_KV_CACHE_NOT_EXIST no such cache at one end
   * @retval LLM_NOT_YET_LINK no link to the peer
   * @retval LLM_TIMEOUT not done in time
   * @retval LLM_FAILED not initialized, or the transfer failed
   * @note May be called from any thread.
   */
  Status PushKvCache(const Cache &src_cache, const CacheIndex &dst_cache_index, uint32_t src_batch_index = 0U,
                     int64_t size = -1, const KvCacheExtParam &ext_param = {});

  /**
   * @brief Copy blocks of a local cache into blocks of a peer's cache, in each tensor.
   * @param [in] src_cache the local cache, on kDevice; only cache_id is looked at
   * @param [in] dst_cache_index the peer's cache; batch_index must be 0
   * @param [in] src_blocks local blocks
   * @param [in] dst_blocks blocks of the peer, as many; of two pairs with one destination the last counts
   * @param [in] ext_param layers; both ranges must span as many
   * @retval LLM_SUCCESS the bytes are in place at the peer
   * @retval LLM_PARAM_INVALID lists that are empty, differ in length or leave a cache, block sizes that differ, and as
   *   for PushKvCache
   * @retval LLM_KV_CACHE_NOT_EXIST no such cache at one end
   * @retval LLM_NOT_YET_LINK no link to the peer
   * @retval LLM_TIMEOUT not done in time
   * @retval LLM_FAILED not initialized, or the transfer failed
   * @note May be called from any thread.
   */
  Status PushKvBlocks(const Cache &src_cache, const CacheIndex &dst_cache_index,
                      const std::vector<uint64_t> &src_blocks, const std::vector<uint64_t> &dst_blocks,
                      const KvCacheExtParam &ext_param = {});

  /**
   * @brief Make the caller's memory a cache that peers can reach by batch entry and by block. Before or after linking.
   * @param [in] cache_desc geometry
   * @param [in] addrs start of each tensor; the memory stays the caller's and mapped until UnregisterKvCache
   * @param [in] cfg reserved
   * @param [out] cache_id 1, 2, 3, ... since Initialize; left alone on failure
   * @retval LLM_SUCCESS
   * @retval LLM_PARAM_INVALID no addresses, not as many as num_tensors, an address 0, a shape without dimensions, with
   *   32 or more, or with one that is not positive, a data type without size, or more than llm.MaxRegisteredAddrs
   * @retval LLM_FAILED not initialized
   * @note May be called from any thread.
   */
  Status RegisterKvCache(const CacheDesc &cache_desc, const std::vector<uint64_t> &addrs, const RegisterCfg &cfg,
                         int64_t &cache_id);

  /**
   * @brief Forget a cache; its memory is the caller's again when this succeeds. Unknown ids are a success.
   * @param [in] cache_id from RegisterKvCache
   * @retval LLM_SUCCESS
   * @retval LLM_LINK_BUSY transfers still use it; keep it mapped and call again
   * @retval LLM_FAILED not initialized
   * @note May be called from any thread.
   */
  Status UnregisterKvCache(int64_t cache_id);

 private:
  class LlmDataDistImpl;
  std::unique_ptr<LlmDataDistImpl> impl_;
};
}  // namespace llm_datadist

#endif  // LLM_DATADIST_LLM_DATADIST_H_
