// SPDX-License-Identifier: Apache-2.0
#include "lamina/schedule/workload.h"

#include "lamina/base/error.h"

namespace lamina::schedule {

Workload workload_of(const Chain& chain) {
  const bool begins = chain.visits.empty() || (chain.visits[0].rank == 0 && !chain.visits[0].backward_only);
  if (!begins) throw base::InternalError("a chain of visits does not begin with the step body, on rank 0");
  Workload workload{.pieces = {}, .microbatches = chain.microbatches, .delay = chain.delay};
  auto& pieces = workload.pieces;
  int of_body = -1;  // the latest piece of the step body
  int forward = -1;  // the latest one that a forward comes to
  const auto after = [&](int at, int rank) {
    const Visit& visit = pieces[at].work;
    return Need{at, visit.rank == rank ? 0 : visit.message};
  };
  const auto add = [&](const Visit& visit) {
    const int at = static_cast<int>(pieces.size());
    Piece& piece = pieces.emplace_back(Piece{.work = visit});
    const bool in_body = visit.rank == 0 && !visit.backward_only;
    if (in_body) piece.before = of_body;
    const bool goes_on = in_body && of_body == at - 1;
    if (!goes_on && !visit.backward_only) piece.forward_needs.push_back(after(forward, visit.rank));
    if (!goes_on) pieces[at - 1].backward_needs.push_back({at, after(at - 1, visit.rank).time});
    if (!visit.backward_only) forward = at;
    if (in_body) of_body = at;
  };
  for (const Visit& visit : chain.visits) add(visit);
  add({.rank = 0, .forward = 0, .backward = 0});
  return workload;
}

Chain even_chain(int stages, int microbatches, std::int64_t forward, std::int64_t backward, std::int64_t weights) {
  Chain chain;
  for (int rank = 0; rank < stages; ++rank) {
    const bool is_first = rank == 0 && weights > 0;
    chain.visits.push_back({.rank = rank, .forward = forward, .backward = backward});
    chain.visits.back().weights = is_first ? backward : weights;
  }
  chain.microbatches = microbatches;
  return chain;
}

}  // namespace lamina::schedule
