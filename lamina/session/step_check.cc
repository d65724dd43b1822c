// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/step_check.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/digests/comparison.h"
#include "lamina/environment/memory.h"
#include "lamina/messaging/agreement.h"
#include "lamina/model/values.h"
#include "lamina/session/slicing.h"

namespace lamina::session {
namespace {

using digests::RankRecording;

std::map<std::string, int> calls_of_modules(const RankRecording& rank) {
  std::map<std::string, int> calls;
  for (const auto& [call, surroundings] : rank.calls) ++calls[std::get<2>(call)];
  return calls;
}

// True where a module was called more often than in the plain model, as where the step calls the model twice: then
// gradients of parameters are not those of one call.
bool has_other_calls(const std::vector<RankRecording>& ranks, const RankRecording& plain) {
  const auto known = calls_of_modules(plain);
  return std::ranges::any_of(ranks, [&](const auto& rank) {
    return std::ranges::any_of(calls_of_modules(rank), [&](const auto& module) {
      const auto plainly = known.find(module.first);
      return plainly == known.end() || module.second > plainly->second;
    });
  });
}

// Leaves out what has no like in a layout. A part that a checkpoint runs again in the backward is a call as any other
// where it runs for another rank.
void leave_out(RankRecording& plain, const std::vector<RankRecording>& ranks) {
  const bool has_others = has_other_calls(ranks, plain);
  std::erase_if(plain.seen, [&](const auto& seen) {
    return seen.kind == digests::RecordedKind::kGradient ? has_others : seen.call < 0;
  });
}

void compare_copy(Session& session, const verification::PlainRun* plain, const Slicings& slicings) {
  session.run_recorder()->end_step_of([&](const std::string& name, const at::Tensor& gradient) {
    const auto slicing = slicings.find(name);
    return slicing == slicings.end() ? gradient : whole_of(session, gradient, slicing->second);
  });
  std::vector<model::NamedValue> own;
  own.emplace_back("recording", session.run_recorder()->text());
  const bool have_one_batch = session.topology().resolved(topology::kReplicas) == topology::kSameParts;
  const auto group = have_one_batch ? topology::kOneCopy : topology::kPartitions;
  const auto told =
      model::gather(std::move(own), /*to_first=*/true, session.members(group), session.mailbox(), session.patience());
  if (plain == nullptr) return;
  std::vector<RankRecording> ranks;
  for (const auto& [what, text] : told) ranks.push_back(digests::read_text(text.as<std::string>()));
  auto recording = plain->recording();
  leave_out(recording, ranks);
  const auto comparison = digests::compare(ranks, {recording}, {});
  if (comparison.differences.empty()) return;
  throw base::UsageError(
      base::str("this step is not that of the plain model, and nothing was updated: ", digests::describe(comparison),
                "run the script by `lamina verify -n ", session.world().size, "`, which compares more and says why"),
      base::Code{"step-differs"});
}

}  // namespace

void compare_step(Session& session, const verification::PlainRun* plain, const Slicings& slicings) {
  messaging::act_together(
      session.mailbox(), session.ranks().everyone(),
      [&] {
        if (session.run_recorder() != nullptr) compare_copy(session, plain, slicings);
      },
      session.patience());
}

bool has_room_for_plain(Session& session, std::int64_t bytes) {
  constexpr std::int64_t kParts = 3;  // values, gradients, and what lies between layers
  const auto leading = std::max(1, session.world().local_size / session.topology().size(topology::kPartitions));
  const auto available = environment::available_memory();
  const bool lacks = available && *available / kParts / leading < bytes;
  return messaging::largest(session.mailbox(), session.members(topology::Group::kWorld), {lacks ? 1.0 : 0.0},
                            session.patience())
             .front() == 0;
}

void end_checks(Session& session) {
  const auto& recorder = session.run_recorder();
  if (recorder == nullptr) return;
  session.job().call_hooks().remove(recorder);
  recorder->let_go();
}

}  // namespace lamina::session
