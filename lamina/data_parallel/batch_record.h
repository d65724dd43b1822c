// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/messaging/mailbox.h"

namespace lamina::data_parallel {

// Numbers of a batch that the ranks of a training loop tell each other. Before its step they say how much of it each
// copy of the model has, after it how the step went. So all weigh its parts alike, log one loss, and end together. One
// rank of each copy gives samples, tokens and losses. A record takes 64 bytes whatever the number of ranks, and 8 more
// for each loss after the third.
struct BatchRecord {
  bool is_after_step = false;  // the same on all ranks
  // Sums.
  std::int64_t samples = 0, tokens = 0;
  std::uint32_t ended = 0;  // ranks whose training has ended
  double seconds = 0;       // that one rank gives, of its clock
  std::vector<double> losses = {};
  // The largest.
  std::uint32_t most_samples = 0;  // of a copy
  // True where a rank says so.
  bool has_data = false;         // its loader gave a batch
  bool lacks_data = false;       // nothing counts of its batch, nor of one before
  bool stops = false;            // it wants the training to end
  bool lacks_memory = false;     // its step ran out of memory
  bool names_differ = false;     // of losses, by `loss_names`
  std::uint32_t loss_names = 0;  // a hash of them

  // Has a copy of the model have so much of the batch. `most_samples` ends at its largest number.
  void give_samples(std::int64_t samples, std::int64_t tokens);
  // Says what the losses are called. All ranks do, those that give none, too.
  void name_losses(std::span<const std::string> names);

  friend bool operator==(const BatchRecord&, const BatchRecord&) = default;
};

std::string to_bytes(const BatchRecord& record);
// Throws base::FormatError for bytes of another length.
BatchRecord to_record(std::string_view bytes);

// The records of all members as one, the same on each; collective over them. Throws base::UsageError where some are
// after a step and others before one, and as Mailbox::exchange does.
BatchRecord together(messaging::Mailbox& mailbox, std::span<const base::Rank> members, const BatchRecord& own,
                     const base::Patience& patience);

}  // namespace lamina::data_parallel
