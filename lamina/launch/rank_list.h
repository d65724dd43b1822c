// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "lamina/base/ids.h"

namespace lamina::launch {

// "rank 3", or "ranks 0-2, 5", for ranks in rising order.
std::string name_ranks(const std::vector<base::Rank>& ranks);

}  // namespace lamina::launch
