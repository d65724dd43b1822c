// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lamina/collective/ranks.h"
#include "lamina/config/config.h"

namespace lamina::distributed_optimizer {

// [Note: options] Ranks that train one model step with the same class of optimizer and the same options: copies that
// do not train apart, and so do the parts of a pipeline. An optimizer tells its options as a text, with a line
// `what = value` for each; before an update ranks compare hashes of it.
std::int64_t hash_of_options(const std::string& options);

// The ranks that train one model with this one. `with_copies`: none of its copies has left a join. Without ddp copies
// train apart.
std::vector<base::Rank> trained_with(const collective::Ranks& ranks, const config::Config& config, bool with_copies);

// Collective over `trained`, those of trained_with(): throws base::UsageError, on all, with the first line in which
// options differ.
void require_alike(const std::string& options, std::span<const base::Rank> trained, const collective::Ranks& ranks);
// Does so where it is known that hashes differ.
[[noreturn]] void tell_difference(const std::string& options, std::span<const base::Rank> trained,
                                  const collective::Ranks& ranks);

}  // namespace lamina::distributed_optimizer
