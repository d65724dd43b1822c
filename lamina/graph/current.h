// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "lamina/graph/border.h"

namespace lamina::graph {

// The border of this process's session: operators of other libraries get numbers and tensors, and nothing of ours.
// Throws base::UsageError where there is no session.
std::shared_ptr<Border> current();
void set_current(std::shared_ptr<Border> border);  // nullptr: there is none any more

}  // namespace lamina::graph
