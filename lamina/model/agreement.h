// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <vector>

#include "lamina/messaging/mailbox.h"

namespace lamina::model {

// The words of a rank when the model is cut.
struct Statement {
  std::string description;  // of its model: a line for each module and tensor; equal texts, equal models
  std::string error;        // of the plan; "" for none. Of the first rank alone
  value::Value word;        // what else all are to know, as the plan; of the first rank alone
};

// Collective over `world`: the word of the first rank. Descriptions are compared by their hashes, and travel
// only where these differ. Throws base::ConfigError with the first rank's error, and base::UsageError where a rank has
// built another model than the first; the same on every rank.
value::Value agree(const Statement& statement, std::span<const base::Rank> world, messaging::Mailbox& mailbox,
                   const base::Patience& patience);

}  // namespace lamina::model
