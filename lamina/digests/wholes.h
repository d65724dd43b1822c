// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <string_view>
#include <vector>

#include "lamina/base/outer.h"
#include "lamina/digests/recording.h"

// The tensors of a run, whichever of its ranks has which part of them.
namespace lamina::digests {

using base::outer;

// The parameter whose state of an optimizer has this name.
constexpr std::string_view parameter_of(std::string_view state) { return state.substr(0, state.rfind(' ')); }

inline bool is_of_call(RecordedKind kind) { return kind <= RecordedKind::kOutputGradient; }

// A tensor of a run. One of the model has no copy, for its parts may lie in several.
struct Key {
  std::int64_t step, copy, microbatch;
  RecordedKind kind;
  std::string_view name;
  std::int64_t call, index;

  auto operator<=>(const Key&) const = default;
};

struct RecordedPart {
  const RankRecording* rank;
  const Seen* seen;
};

using RankRecordings = std::vector<RankRecording>;
using RecordedParts = std::map<Key, std::vector<RecordedPart>>;

RecordedParts parts_of(const RankRecordings& run);

// A whole tensor, put together of what ranks have of it.
struct Whole {
  Digest digest;
  RecordedPart of;       // the first part
  bool is_part = false;  // there are others
};

// Each whole tensor that these parts make, the one of the first ranks first; parts that lack their neighbours are left
// out.
std::vector<Whole> wholes_of(const std::vector<RecordedPart>& parts);

}  // namespace lamina::digests
