// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <queue>

#include "lamina/archive/manifest.h"
#include "lamina/base/str.h"
#include "lamina/layout/common.h"

namespace lamina::archive {
namespace {

// A piece, and its first elements that were not met yet.
struct Next {
  std::int64_t offset = 0;  // in the tensor
  std::int64_t end = 0;
  std::size_t piece = 0;

  friend auto operator<=>(const Next&, const Next&) = default;
};

std::string between(std::int64_t begin, std::int64_t end) { return base::str("elements from ", begin, " to ", end); }

}  // namespace

// Walks over the tensor, always on with the piece whose next elements are the first.
std::string pieces_problem(const SavedTensor& tensor) {
  std::vector<layout::Finder> finders;
  std::priority_queue<Next, std::vector<Next>, std::greater<>> queue;
  const auto push = [&](std::size_t piece, std::int64_t from) {
    if (const auto block = finders[piece].at_or_after(from)) {
      queue.push({block->offset, block->offset + block->count, piece});
    }
  };
  for (const auto& piece : tensor.pieces) {
    finders.emplace_back(piece.region);
    push(finders.size() - 1, 0);
  }
  std::int64_t done = 0;
  while (!queue.empty()) {
    const auto next = queue.top();
    queue.pop();
    if (next.offset > done) return between(done, next.offset) + " are in no piece";
    if (next.offset < done) return between(next.offset, std::min(done, next.end)) + " are in two pieces";
    done = next.end;
    push(next.piece, done);
  }
  const auto all = layout::numel(tensor.shape);
  return done < all ? between(done, all) + " are in no piece" : "";
}

}  // namespace lamina::archive
