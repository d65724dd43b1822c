// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "lamina/plan/prediction.h"

namespace lamina::plan {

// One line when a rank has far more to do than the mean, which module is to blame, and what helps; else empty.
std::string warn_of_bottleneck(const ModuleTree& tree, const Assignment& owners, const Route& route,
                               const Prediction& prediction);

}  // namespace lamina::plan
