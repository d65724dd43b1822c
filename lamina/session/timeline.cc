// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/timeline.h"

#include <algorithm>
#include <fstream>
#include <limits>

#include "lamina/base/output_file.h"
#include "lamina/messaging/agreement.h"
#include "lamina/observe/summary.h"
#include "lamina/observe/timeline_part.h"
#include "lamina/runtime/turn_times.h"
#include "lamina/session/device_end.h"
#include "lamina/session/session.h"

namespace lamina::session {
namespace {

constexpr const char* kChannel = "lamina: timeline";
constexpr int kRounds = 16;  // the quickest one counts

// One end of an exchange with `peer`.
struct Line {
  messaging::Mailbox& mailbox;
  const base::Patience& patience;
  base::Rank peer;

  void say(value::Value value) const { mailbox.send(peer, kChannel, std::move(value)); }
  template <class T>
  T hear() const {
    return mailbox.receive(peer, kChannel, patience).as<T>();
  }
};

// How far this rank's clock is ahead of the first one's, which answers in take().
std::int64_t ahead_ns(const Line& first, const Clock& clock) {
  first.say(clock.name);
  if (first.hear<bool>()) return 0;
  std::int64_t ahead = 0;
  auto quickest = std::numeric_limits<std::int64_t>::max();
  for (int round = 0; round < kRounds; ++round) {
    const auto begin = clock.now_ns();
    first.say(true);
    const auto there = first.hear<std::int64_t>();
    const auto end = clock.now_ns();
    if (end - begin >= quickest) continue;
    quickest = end - begin;
    ahead = begin + (end - begin) / 2 - there;
  }
  return ahead;
}

// On the first rank: what another one gives.
observe::Timeline take(const Line& other, const Clock& clock) {
  const bool shared = other.hear<std::string>() == clock.name;
  other.say(shared);
  for (int round = 0; !shared && round < kRounds; ++round) {
    other.hear<bool>();
    other.say(clock.now_ns());
  }
  return observe::decode(other.hear<std::string>());
}

}  // namespace

// The steady clock counts from the start of the system, which has an id.
Clock clock_of_this_machine() {
  Clock clock{"", observe::now_ns};
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), clock.name);
  return clock;
}

observe::Timeline gather(observe::Timeline mine, base::Rank self, std::span<const base::Rank> members,
                         messaging::Mailbox& mailbox, const base::Patience& patience, const Clock& clock) {
  const base::Rank first = members.front();
  if (self != first) {
    const Line line{mailbox, patience, first};
    for (auto& record : mine.ranks) record.ahead_ns = ahead_ns(line, clock);
    line.say(observe::encode(mine));
    return mine;
  }
  for (auto member : members) {
    if (member != self) observe::add(mine, take({mailbox, patience, member}, clock));
  }
  observe::complete(mine);
  return mine;
}

void start_timeline(Session& session, const std::string& path) {
  const auto require = [&]() -> value::Value {
    base::require_output(path);
    return true;
  };
  messaging::made_by_first(session.mailbox(), session.members(topology::Group::kWorld), require, session.patience());
  session.start_timeline();
}

std::string write_timeline(Session& session, const std::string& path) {
  const auto members = session.members(topology::Group::kWorld);
  const auto self = session.world().rank;
  await_device(session);
  runtime::record_passed();
  const auto timeline = gather(session.recorder().stop(), self, members, session.mailbox(), session.patience());
  if (self != members.front()) return "";
  observe::write_file(timeline, path);
  return observe::describe(observe::summarise(timeline));
}

}  // namespace lamina::session
