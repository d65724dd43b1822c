// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "lamina/graph/border.h"

namespace lamina::graph {

// [Note: copies of a model] Ranks that have one copy of a model share a border. Ranks that have the same part of it, in
// several copies, share another one: there they add gradients, and give each other values. Its steps are numbered
// apart, as copies may evaluate without each other.
enum class Among : std::uint8_t { kOneCopy, kCopies };

// A border of this process's session: operators of other libraries get numbers and tensors, and nothing of ours. Throws
// base::UsageError where there is no session.
std::shared_ptr<Border> current(Among among = Among::kOneCopy);
// nullptr: there is none any more.
void set_current(Among among, std::shared_ptr<Border> border);

// Has both fail where one does: of a step in which copies train, what ends it in one of them ends it in all.
void fail_together(const std::shared_ptr<GraphStep>& one, const std::shared_ptr<GraphStep>& other);
// Has the next step of a border fail where this one does: those who share that border are not told otherwise.
void fail_before(const std::shared_ptr<GraphStep>& step, const std::shared_ptr<Border>& border);

}  // namespace lamina::graph
