#include <cstring>
#include <string_view>

#include "external/ge_common/api_error_codes.h"

namespace ge {
namespace {
std::string_view View(const AscendString &text) { return {text.GetString(), text.GetLength()}; }
std::string_view View(const char *text) { return text == nullptr ? std::string_view() : std::string_view(text); }
}  // namespace

AscendString::AscendString(const char *name) : AscendString(name, name == nullptr ? 0U : std::strlen(name)) {}

AscendString::AscendString(const char *name, size_t length) {
  if (name != nullptr) {
    text_.reserve(length + 1U);
    text_.assign(name, name + length);
    text_.push_back('\0');
  }
}

const char *AscendString::GetString() const { return text_.empty() ? "" : text_.data(); }
size_t AscendString::GetLength() const { return text_.empty() ? 0U : text_.size() - 1U; }
size_t AscendString::Find(const AscendString &ascend_string) const { return View(*this).find(View(ascend_string)); }
size_t AscendString::Hash() const { return std::hash<std::string_view>()(View(*this)); }

bool AscendString::operator<(const AscendString &other) const { return View(*this) < View(other); }
bool AscendString::operator>(const AscendString &other) const { return View(*this) > View(other); }
bool AscendString::operator<=(const AscendString &other) const { return View(*this) <= View(other); }
bool AscendString::operator>=(const AscendString &other) const { return View(*this) >= View(other); }
bool AscendString::operator==(const AscendString &other) const { return View(*this) == View(other); }
bool AscendString::operator!=(const AscendString &other) const { return View(*this) != View(other); }
bool AscendString::operator==(const char *other) const { return View(*this) == View(other); }
bool AscendString::operator!=(const char *other) const { return View(*this) != View(other); }
}  // namespace ge
