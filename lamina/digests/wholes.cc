// SPDX-License-Identifier: Apache-2.0
#include "lamina/digests/wholes.h"

#include <algorithm>
#include <utility>

namespace lamina::digests {
namespace {

// RecordedParts of these may lie on ranks of several copies of the model.
bool is_of_model(RecordedKind kind) { return kind >= RecordedKind::kGradient && kind <= RecordedKind::kState; }

}  // namespace

RecordedParts parts_of(const RankRecordings& run) {
  RecordedParts parts;
  for (const auto& rank : run) {
    for (const auto& seen : rank.seen) {
      const std::int64_t copy = is_of_model(seen.kind) ? -1 : rank.copy;
      parts[{seen.step, copy, seen.microbatch, seen.kind, seen.name, seen.call, seen.index}].push_back({&rank, &seen});
    }
  }
  return parts;
}

std::vector<Whole> wholes_of(const std::vector<RecordedPart>& parts) {
  std::map<std::int64_t, std::vector<RecordedPart>> by_begin;
  for (const auto& part : parts) by_begin[part.seen->digest.begin].push_back(part);
  std::size_t most = 0;
  for (const auto& [begin, group] : by_begin) most = std::max(most, group.size());
  std::vector<Whole> wholes;
  for (std::size_t number = 0; number < most; ++number) {
    Whole whole;
    std::int64_t at = 0;
    bool over = false;
    for (auto group = by_begin.find(0); group != by_begin.end() && !over; group = by_begin.find(at)) {
      const RecordedPart& part = group->second[std::min(number, group->second.size() - 1)];
      const Digest& digest = part.seen->digest;
      if (at == 0) {
        whole = {digest, part};
      } else {
        add(whole.digest, digest);
        whole.is_part = true;
      }
      at += digest.elements;
      over = at >= digest.whole() || digest.elements == 0;
    }
    if (over) wholes.push_back(std::move(whole));
  }
  return wholes;
}

}  // namespace lamina::digests
