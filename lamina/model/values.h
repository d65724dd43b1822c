// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lamina/messaging/mailbox.h"
#include "lamina/model/parameter_table.h"

// The values of a model's parameters and buffers: those of world rank 0, given to the ranks that hold them.
namespace lamina::model {

inline constexpr std::size_t kPortionBytes = 1 << 25;

// Differences between the faces when values are given away.
struct ValueHooks {
  // Called before a portion's values are read, with its rows: makes those of rows here, or all on the first rank.
  std::function<void(std::span<const Parameter>)> make;
  // Says what a use of a row on this rank is told, which does not hold it; begins with where it is and a semicolon.
  std::function<std::string(const Parameter&)> why;
  // Called when a portion's values are here, with its rows.
  std::function<void(std::span<const Parameter>)> given = nullptr;
};

// The ranks that are to have the same values.
struct Alike {
  std::vector<base::Rank> world;       // of what is whole
  std::vector<base::Rank> same_slice;  // of what is cut into slices, where this rank's is theirs
};

// Collective over all of them: gives every tensor here the value that it has on the first rank, on the rank's device,
// and releases the others. It does so for about so many bytes at a time, so that a rank never holds more than these of
// what is not its own. A checksum decides whether a value is sent. Returns the bytes received.
std::int64_t give_values(const ParameterTable& table, const Alike& alike, messaging::Mailbox& mailbox,
                         const base::Patience& patience, const ValueHooks& hooks,
                         std::size_t portion_bytes = kPortionBytes);

// [Note: memory of released values] Frees the values of rows that are not here. The memory goes although views of it
// are alive, such as a transposed weight that a graph has saved. When such a view is read, it throws, and says why:
// else it would keep the memory, with values that training elsewhere has overtaken. It stays where a tensor that is
// here lies in it, too.
void release_others(const ParameterTable& table, const std::function<std::string(const Parameter&)>& why);

// A part of a state: of a model's mostly a tensor.
using NamedValue = std::pair<std::string, value::Value>;

// Collective over `pipeline`: the parts that its ranks own, rank by rank, on each of them, or on the first alone and
// nothing on the others. They travel a portion of about so many bytes a rank at a time.
std::vector<NamedValue> gather(std::vector<NamedValue> own, bool to_first, std::span<const base::Rank> pipeline,
                               messaging::Mailbox& mailbox, const base::Patience& patience,
                               std::size_t portion_bytes = kPortionBytes);

// Collective over `pipeline`: the values of all rows, in the table's order, detached, each from the rank that holds it.
std::vector<at::Tensor> gather(const ParameterTable& table, std::span<const base::Rank> pipeline,
                               messaging::Mailbox& mailbox, const base::Patience& patience);

}  // namespace lamina::model
