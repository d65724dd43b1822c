// SPDX-License-Identifier: Apache-2.0
#include "lamina/sharding/shared_layout.h"

namespace lamina::sharding {
namespace {

constexpr std::size_t kLine = 64;    // bytes that a processor's cache keeps together
constexpr std::size_t kPage = 4096;  // that the system gives at once

std::size_t up_to(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

SharedLayout::SharedLayout(int members, std::vector<std::size_t> value_bytes, std::size_t arena_bytes)
    : members_(members), arena_bytes_(up_to(arena_bytes, kPage)) {
  std::size_t at = up_to(word(2 + 4 * value_bytes.size(), 0), kPage);
  for (const auto bytes : value_bytes) {
    values_.push_back(at);
    at += up_to(bytes, kLine);
  }
  arenas_ = up_to(at, kPage);
  bytes_ = arenas_ + static_cast<std::size_t>(members) * arena_bytes_;
}

std::size_t Pieces::size(std::size_t bytes) { return up_to(bytes, kLine); }

std::optional<std::size_t> Pieces::take(std::size_t bytes) {
  bytes = size(bytes);
  std::size_t begin = 0;
  for (const auto& [other, end] : taken_) {
    if (other - begin >= bytes) break;
    begin = end;
  }
  if (begin + bytes > bytes_) return {};
  taken_[begin] = begin + bytes;
  return begin;
}

std::size_t Pieces::in_use() const {
  std::size_t bytes = 0;
  for (const auto& [begin, end] : taken_) bytes += end - begin;
  return bytes;
}

}  // namespace lamina::sharding
