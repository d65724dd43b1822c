// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/layout_configs.h"

#include <algorithm>
#include <array>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::config {
namespace {

constexpr std::array<std::string_view, 3> kPrecisions{"fp32", "amp_fp16", "amp_bf16"};

}  // namespace

std::string_view name_of(Precision precision) { return kPrecisions.at(static_cast<std::size_t>(precision)); }

std::optional<Precision> find_precision(std::string_view name) {
  const auto word = lower(name);
  if (word == "amp" || word == "fp16") return Precision::kAmpFp16;
  if (word == "bf16") return Precision::kAmpBf16;
  const auto found = std::ranges::find(kPrecisions, word);
  return found == kPrecisions.end() ? std::nullopt : std::optional(static_cast<Precision>(found - kPrecisions.begin()));
}

Precision read_precision(const UserValue& given, std::string_view device_type) {
  if (std::holds_alternative<std::monostate>(given.value)) {
    return device_type == "cpu" ? Precision::kFp32 : Precision::kAmpFp16;
  }
  const auto word = word_of(given);
  if (const auto found = find_precision(word)) return *found;
  throw base::ConfigError(base::str("precision=", given.shown,
                                    ": it is one of fp32, amp_fp16, amp_bf16; the nearest is ",
                                    nearest_of(word, {kPrecisions.begin(), kPrecisions.end()})));
}

FloatType dtype_of(Precision precision) {
  if (precision == Precision::kFp32) return FloatType::kFp32;
  return precision == Precision::kAmpFp16 ? FloatType::kFp16 : FloatType::kBf16;
}

std::string in_section(std::string_view config, std::string_view key, Notation notation) {
  return base::str(config, "[", show(std::string(key), notation), "]");
}

InitKeys keys_of_dtypes(std::optional<FloatType> param, std::optional<FloatType> reduce,
                        std::optional<FloatType> buffer) {
  using enum FloatType;
  const bool is_half = param == kFp16 || param == kBf16;
  const auto name = [&](std::optional<FloatType> dtype) -> Scalar {
    if (dtype == kFp16) return "fp16";
    if (dtype == kBf16) return "bf16";
    return dtype == kFp32 && is_half ? Scalar("fp32") : Scalar();
  };
  const auto of_buffers = is_half && !buffer ? Scalar("own") : name(buffer);
  return {{"fp16", param == kFp16},
          {"bf16", param == kBf16},
          {"reduce_dtype", name(reduce)},
          {"buffer_dtype", buffer == param ? Scalar() : of_buffers}};
}

}  // namespace lamina::config
