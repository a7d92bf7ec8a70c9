/**
 * @file api_error_codes.h
 * @brief The few types of namespace ge that the LLM-DataDist API uses: Status, AscendString, DataType.
 */
#ifndef LLM_DATADIST_EXTERNAL_GE_COMMON_API_ERROR_CODES_H_
#define LLM_DATADIST_EXTERNAL_GE_COMMON_API_ERROR_CODES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#ifdef FUNC_VISIBILITY
#define ASCEND_FUNC_VISIBILITY __attribute__((visibility("default")))
#else
#define ASCEND_FUNC_VISIBILITY
#endif

/** Number of a status: 2 bits runtime, 2 bits type, 3 bits level, 8 bits system, 5 bits module, 12 bits value. */
#define GE_ERRORNO_DEFINE(runtime, type, level, sysid, modid, name, value)                                   \
  constexpr ::ge::Status name = (static_cast<::ge::Status>(0xFFU & (static_cast<uint8_t>(runtime))) << 30) | \
                                (static_cast<::ge::Status>(0xFFU & (static_cast<uint8_t>(type))) << 28) |    \
                                (static_cast<::ge::Status>(0xFFU & (static_cast<uint8_t>(level))) << 25) |   \
                                (static_cast<::ge::Status>(0xFFU & (static_cast<uint8_t>(sysid))) << 17) |   \
                                (static_cast<::ge::Status>(0xFFU & (static_cast<uint8_t>(modid))) << 12) |   \
                                (static_cast<::ge::Status>(0x0FFFU & (static_cast<uint16_t>(value))))

namespace ge {
/** Outcome of a call. */
using Status = uint32_t;

constexpr Status SUCCESS = 0x0U;
constexpr Status FAILED = 0xFFFFFFFFU;

/**
 * @brief Text that crosses the library's boundary whatever ABI std::string has in the caller.
 *
 * A value type: copies are independent. Usable as the key of a std::map.
 */
class ASCEND_FUNC_VISIBILITY AscendString {
 public:
  /** Without content; equal to "". */
  AscendString() = default;
  /** Copy of a zero-terminated text; nullptr is "without content". */
  AscendString(const char *name);  // NOLINT(google-explicit-constructor): implicit in the original
  /** Copy of the first @p length bytes of a text. */
  AscendString(const char *name, size_t length);

  /** The text, zero-terminated; "" without content. Valid until the object changes. */
  const char *GetString() const;
  /** Bytes of the text. */
  size_t GetLength() const;
  /** Position of the first occurrence of a text; SIZE_MAX if there is none. */
  size_t Find(const AscendString &ascend_string) const;
  /** Hash of the text. */
  size_t Hash() const;

  bool operator<(const AscendString &other) const;
  bool operator>(const AscendString &other) const;
  bool operator<=(const AscendString &other) const;
  bool operator>=(const AscendString &other) const;
  bool operator==(const AscendString &other) const;
  bool operator!=(const AscendString &other) const;
  bool operator==(const char *other) const;
  bool operator!=(const char *other) const;

 private:
  std::vector<char> text_;
};

/** Element type of a cache. */
enum DataType : int32_t {
  DT_FLOAT = 0,
  DT_FLOAT16 = 1,
  DT_INT8 = 2,
  DT_INT32 = 3,
  DT_UINT8 = 4,
  DT_INT16 = 6,
  DT_UINT16 = 7,
  DT_UINT32 = 8,
  DT_INT64 = 9,
  DT_UINT64 = 10,
  DT_DOUBLE = 11,
  DT_BOOL = 12,
  DT_STRING = 13,
  DT_DUAL_SUB_INT8 = 14,
  DT_DUAL_SUB_UINT8 = 15,
  DT_COMPLEX64 = 16,
  DT_COMPLEX128 = 17,
  DT_QINT8 = 18,
  DT_QINT16 = 19,
  DT_QINT32 = 20,
  DT_QUINT8 = 21,
  DT_QUINT16 = 22,
  DT_RESOURCE = 23,
  DT_STRING_REF = 24,
  DT_DUAL = 25,
  DT_VARIANT = 26,
  DT_BF16 = 27,
  DT_UNDEFINED = 28,
  DT_INT4 = 29,
  DT_UINT1 = 30,
  DT_INT2 = 31,
  DT_UINT2 = 32,
  DT_COMPLEX32 = 33,
  DT_HIFLOAT8 = 34,
  DT_FLOAT8_E5M2 = 35,
  DT_FLOAT8_E4M3FN = 36,
  DT_FLOAT8_E8M0 = 37,
  DT_FLOAT6_E3M2 = 38,
  DT_FLOAT6_E2M3 = 39,
  DT_FLOAT4_E2M1 = 40,
  DT_FLOAT4_E1M2 = 41,
  DT_MAX = 42
};
}  // namespace ge

namespace std {
template <>
struct hash<ge::AscendString> {
  size_t operator()(const ge::AscendString &text) const { return text.Hash(); }
};
}  // namespace std

#endif  // LLM_DATADIST_EXTERNAL_GE_COMMON_API_ERROR_CODES_H_
