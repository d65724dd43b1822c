// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "lamina/base/ids.h"

namespace lamina::base {

// "rank 3", or "ranks 0-2, 5", for ranks in rising order.
std::string name_ranks(const std::vector<Rank>& ranks);

// " without rank 3, which has not come"; "" for none.
std::string without(const std::vector<Rank>& absent);

}  // namespace lamina::base
