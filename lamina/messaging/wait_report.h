// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/value/value.h"

// Reports of ranks on what they wait in, and for whom: see [Note: mutual waits].
namespace lamina::messaging {

enum class WaitKind : std::int64_t { kValue, kExchange, kGroup, kStep };
// An operation is what all its members have to come to.
struct WaitOperation {
  WaitKind kind = WaitKind::kValue;
  std::string key;          // the channel, or the group
  std::int64_t number = 0;  // counted by key; of kValue by sender and receiver, too
  friend bool operator==(const WaitOperation&, const WaitOperation&) = default;
};

// A wait as others hear of it.
struct WaitReport {
  base::Rank rank;
  std::int64_t serial = 0;  // of this wait among those of the rank
  WaitOperation operation;
  std::int64_t attempt = 0;             // at the operation, which may have been given up, and keep its number
  std::optional<WaitOperation> around;  // a step that has begun, and in which the rank waits for something else
  std::string words;                    // "rank 1 waits in lamina.barrier() at train.py:12 for rank 0"
};
using WaitPath = std::vector<WaitReport>;

// Ranks that others wait for: those that have not come to an operation, and those that keep them from it in the end.
// They are the same ones unless these wait themselves.
struct Awaited {
  std::vector<base::Rank> absent, last;
  friend bool operator==(const Awaited&, const Awaited&) = default;
};

// The answer of a rank that waits itself to one that waits for it.
struct WaitAnswer {
  // Where it is, seen from that operation: it waits for these in another one or in this one, or has done its part.
  enum class Place : std::int64_t { kElsewhere, kInIt, kDone };
  std::int64_t serial = 0;  // of the wait that is answered
  Place place = Place::kElsewhere;
  Awaited awaited;  // nobody: it does not wait
  friend bool operator==(const WaitAnswer&, const WaitAnswer&) = default;
};

// As messages hold them.
value::Value to_value(const WaitReport& report);
value::Value to_value(const WaitPath& path);
value::Value to_value(const WaitAnswer& answer);
WaitReport to_wait_report(const value::Value& value);
WaitPath to_wait_path(const value::Value& value);
WaitAnswer to_wait_answer(const value::Value& value);

// The error's text on ranks that wait for each other in a circle.
std::string text_of(const WaitPath& circle);
// "; rank 1 waits for what comes from rank 3"; "" where those that are absent do not wait.
std::string beyond(const Awaited& awaited);

}  // namespace lamina::messaging
