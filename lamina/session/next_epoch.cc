// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/next_epoch.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/wait.h"
#include "lamina/session/change.h"

namespace lamina::session {
namespace {

using value::Value;

constexpr auto kHeard = std::chrono::seconds(1);  // after an operation has found a rank lost

}  // namespace

EpochEnd::EpochEnd(Session& session)
    : before_(session), talk_(session.mailbox(), session.transport(), session.patience()) {}

NextEpoch EpochEnd::next(const Value& word, std::int64_t progress) {
  base::internal_check(before_.mailbox().first_loss().has_value(), "an epoch ends without a loss");
  while (true) {
    const auto members = talk_.next();
    std::vector<Value> told;
    try {
      told = talk_.all_gather(members, value::Tuple{{progress, word}});
    } catch (const base::PeerError&) {
      if (!before_.mailbox().loss(members, kHeard)) throw;
      continue;
    }
    std::vector<std::size_t> order(members.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    const auto progress_of = [&](std::size_t at) { return told[at].as<value::Tuple>().items.at(0).as<std::int64_t>(); };
    std::rotate(order.begin(), std::ranges::max_element(order, {}, progress_of), order.end());
    std::sort(order.begin() + 1, order.end());
    NextEpoch next{.number = talk_.number(), .members = {}, .words = {}};
    for (const auto at : order) {
      if (members[at] == before_.world().rank) next.rank = static_cast<int>(next.members.size());
      next.members.push_back(members[at]);
      next.words.push_back(told[at].as<value::Tuple>().items.at(1));
    }
    return next;
  }
}

std::shared_ptr<Session> EpochEnd::open(const NextEpoch& next, std::optional<int> microbatches,
                                        environment::World world, FaceHooks hooks) {
  const auto copies = static_cast<std::int64_t>(next.members.size());
  const auto all = std::int64_t{before_.job().microbatches()} * before_.world().size;
  auto config = before_.config();
  if (!microbatches && all % copies != 0) {
    throw base::ConfigError(
        base::str(copies, " copies of the model that are left cannot share out ", all,
                  " microbatches alike, which a batch of all copies has: give init() such `microbatches` that fewer "
                  "copies can"),
        base::Code{"elastic-refused"});
  }
  config.microbatches = microbatches.value_or(static_cast<int>(all / copies));
  config.verify_steps = 0;
  return open_in(next, std::move(config), std::move(world), std::move(hooks));
}

std::shared_ptr<Session> EpochEnd::open_in(const NextEpoch& next, config::Config config, environment::World world,
                                           FaceHooks hooks) {
  return open_beside(before_, std::move(config), std::move(world), std::move(hooks), next.members,
                     "the ranks that are left meet");
}

}  // namespace lamina::session
