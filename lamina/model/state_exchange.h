// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <vector>

#include "lamina/messaging/mailbox.h"

// The values of a model's parameters and buffers between the ranks that hold parts of it.
namespace lamina::model {

struct Entry {
  std::string name;
  at::Tensor tensor;   // undefined where this rank does not hold the value
  bool owned = false;  // this rank is, or becomes, its owner
};

// Collective over `world`: gives every owned tensor the value it has on the first rank. A checksum decides whether a
// value is sent. The entries are the same, and in the same order, on all ranks; on the first all tensors are defined.
// Returns the bytes received. Throws base::ConfigError on every rank when the ranks' entries differ, naming the first.
std::int64_t synchronize(std::span<Entry> entries, std::span<const base::Rank> world, messaging::Mailbox& mailbox,
                         base::Rank self, const base::Patience& patience);

// Collective over `members`: the tensors of all entries, detached, each from the member that owns it.
std::vector<at::Tensor> gather(std::span<const Entry> entries, std::span<const base::Rank> members,
                               messaging::Mailbox& mailbox, const base::Patience& patience);

}  // namespace lamina::model
