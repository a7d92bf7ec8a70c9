/**
 * @file acl.h
 * @brief The few calls of the accelerator runtime that KV transfer programs use, for machines without accelerators.
 *
 * "Device" memory is ordinary memory, aligned to 2 MiB where it is large. Header only. Thread-safe.
 */
#ifndef LLM_DATADIST_ACL_ACL_H_
#define LLM_DATADIST_ACL_ACL_H_

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef int aclError;

#define ACL_ERROR_NONE 0
#define ACL_SUCCESS 0
#define ACL_ERROR_INVALID_PARAM 100000
#define ACL_ERROR_BAD_ALLOC 200000

typedef enum aclrtMemcpyKind {
  ACL_MEMCPY_HOST_TO_HOST = 0,
  ACL_MEMCPY_HOST_TO_DEVICE = 1,
  ACL_MEMCPY_DEVICE_TO_HOST = 2,
  ACL_MEMCPY_DEVICE_TO_DEVICE = 3
} aclrtMemcpyKind;

typedef enum aclrtMemMallocPolicy {
  ACL_MEM_MALLOC_HUGE_FIRST = 0,
  ACL_MEM_MALLOC_HUGE_ONLY = 1,
  ACL_MEM_MALLOC_NORMAL_ONLY = 2
} aclrtMemMallocPolicy;

static inline aclError aclInit(const char *config_path) {
  (void)config_path;
  return ACL_ERROR_NONE;
}

static inline aclError aclFinalize(void) { return ACL_ERROR_NONE; }

static inline aclError aclrtSetDevice(int32_t device_id) {
  return device_id < 0 ? ACL_ERROR_INVALID_PARAM : ACL_ERROR_NONE;
}

static inline aclError aclrtResetDevice(int32_t device_id) {
  return device_id < 0 ? ACL_ERROR_INVALID_PARAM : ACL_ERROR_NONE;
}

static inline aclError aclrtMalloc(void **dev_ptr, size_t size, aclrtMemMallocPolicy policy) {
  const size_t huge = (size_t)2 << 20;
  const size_t alignment = size >= huge ? huge : (size_t)4096;
  (void)policy;
  if (dev_ptr == NULL || size == 0U) {
    return ACL_ERROR_INVALID_PARAM;
  }
  return posix_memalign(dev_ptr, alignment, size) == 0 ? ACL_ERROR_NONE : ACL_ERROR_BAD_ALLOC;
}

static inline aclError aclrtFree(void *dev_ptr) {
  free(dev_ptr);
  return ACL_ERROR_NONE;
}

static inline aclError aclrtMallocHost(void **host_ptr, size_t size) {
  return aclrtMalloc(host_ptr, size, ACL_MEM_MALLOC_NORMAL_ONLY);
}

static inline aclError aclrtFreeHost(void *host_ptr) { return aclrtFree(host_ptr); }

static inline aclError aclrtMemcpy(void *dst, size_t dest_max, const void *src, size_t count, aclrtMemcpyKind kind) {
  (void)kind;
  if (dst == NULL || src == NULL || count > dest_max) {
    return ACL_ERROR_INVALID_PARAM;
  }
  memcpy(dst, src, count);
  return ACL_ERROR_NONE;
}

static inline const char *aclGetRecentErrMsg(void) { return NULL; }

#ifdef __cplusplus
}
#endif

#endif  // LLM_DATADIST_ACL_ACL_H_
