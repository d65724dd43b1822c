// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "lamina/environment/environment.h"

namespace lamina::environment {

// The terms of a job whose ranks outlive others: `lamina run --elastic MIN[:MAX]`.
struct ElasticTerms {
  int least = 1;  // ranks without which nobody goes on
  int most = 0;   // ranks with those that join; 0: nobody does

  // Reads what the launcher has told; none: no such job.
  static std::optional<ElasticTerms> read(const Environment& environment);
};

}  // namespace lamina::environment
