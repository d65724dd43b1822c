// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/step_check.h"

#include <string>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/digests/comparison.h"
#include "lamina/messaging/agreement.h"
#include "lamina/model/values.h"

namespace lamina::session {
namespace {

void compare_copy(Session& session, const verification::PlainRun* plain) {
  session.run_recorder()->end_step();
  std::vector<model::Named> own;
  own.emplace_back("recording", session.run_recorder()->text());
  const auto told = model::gather(std::move(own), /*to_first=*/true, session.members(topology::kOneCopy),
                                  session.mailbox(), session.patience());
  if (plain == nullptr) return;
  std::vector<digests::RankRecording> ranks;
  for (const auto& [what, text] : told) ranks.push_back(digests::read_text(text.as<std::string>()));
  const auto comparison = digests::compare(ranks, {plain->recording()}, {});
  if (comparison.differences.empty()) return;
  throw base::UsageError(
      base::str("this step is not that of the plain model, and nothing was updated: ", digests::describe(comparison),
                "run the script by `lamina verify -n ", session.world().size, "`, which compares more and says why"),
      base::Code{"step-differs"});
}

}  // namespace

void compare_step(Session& session, const verification::PlainRun* plain) {
  messaging::act_together(
      session.mailbox(), session.ranks().everyone(),
      [&] {
        if (session.run_recorder() != nullptr) compare_copy(session, plain);
      },
      session.patience());
}

}  // namespace lamina::session
