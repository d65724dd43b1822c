// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "lamina/base/wait.h"
#include "lamina/messaging/mailbox.h"

namespace lamina::distributed_optimizer {

// [Note: options] Ranks that train one model step with the same class of optimizer and the same options: copies that
// do not train apart, and so do the parts of a pipeline. An optimizer tells its options as a text, with a line
// `what = value` for each; before an update ranks compare hashes of it.
std::int64_t hash_of_options(const std::string& options);

// Collective over `ranks`, where hashes differ: throws base::UsageError, on all, with the first line in which texts do.
[[noreturn]] void tell_difference(const std::string& options, std::span<const base::Rank> ranks,
                                  messaging::Mailbox& mailbox, const base::Patience& patience);

}  // namespace lamina::distributed_optimizer
