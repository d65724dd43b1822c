// SPDX-License-Identifier: Apache-2.0
#include "lamina/shared_memory/arena.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

namespace lamina::shared_memory {
namespace {

constexpr std::size_t kAlignment = 64;  // bytes; as torch's own

}  // namespace

Arena::Arena(Segment segment, std::size_t begin) : segment_(std::move(segment)), begin_(begin) {
  if (segment_.size() > begin) free_.emplace(begin, segment_.size() - begin);
}

std::shared_ptr<std::byte> Arena::allocate(std::size_t bytes) {
  if (bytes == 0 || bytes > segment_.size() || process_.forked()) return nullptr;
  const std::size_t taken = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  std::size_t offset = 0;
  {
    const std::lock_guard guard(mutex_);
    const auto found = std::ranges::find_if(free_, [&](const auto& piece) { return piece.second >= taken; });
    if (found == free_.end()) return nullptr;
    offset = found->first;
    if (found->second > taken) free_.emplace(offset + taken, found->second - taken);
    free_.erase(found);
  }
  return {segment_.data() + offset,
          [self = shared_from_this(), offset, taken](const std::byte* /*data*/) { self->free(offset, taken); }};
}

std::size_t Arena::offset_of(const std::byte* data) const {
  const std::less<> before;
  const auto* end = segment_.data() + segment_.size();
  if (before(data, segment_.data() + begin_) || !before(data, end)) return 0;
  return static_cast<std::size_t>(data - segment_.data());
}

// The mutex may be held for ever in a child of fork().
void Arena::free(std::size_t offset, std::size_t bytes) {
  if (process_.forked()) return;
  const std::lock_guard guard(mutex_);
  const auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + bytes) {
    bytes += next->second;
    free_.erase(next);
  }
  const auto after = free_.upper_bound(offset);
  if (after != free_.begin() && std::prev(after)->first + std::prev(after)->second == offset) {
    std::prev(after)->second += bytes;
  } else {
    free_.emplace_hint(after, offset, bytes);
  }
}

}  // namespace lamina::shared_memory
