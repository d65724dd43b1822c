// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/next_epoch.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <numeric>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/wait.h"
#include "lamina/environment/progress.h"
#include "lamina/messaging/relay.h"
#include "lamina/session/change.h"
#include "lamina/session/newcomer.h"

namespace lamina::session {
namespace {

using value::Value;

constexpr auto kHeard = std::chrono::seconds(1);  // after an operation has found a rank lost
constexpr auto kNewcomers = "newcomers";          // the channel of words that one is lost

}  // namespace

std::vector<int> nodes_of(const Session& before, const NextEpoch& next) {
  std::vector<int> nodes;
  const auto& seats = before.seats();
  for (const auto member : next.members) {
    nodes.push_back(seats.empty() ? before.world().node_rank : seats[static_cast<std::size_t>(member.value)].node);
  }
  nodes.insert(nodes.end(), next.newcomers.begin(), next.newcomers.end());
  return nodes;
}

EpochEnd::EpochEnd(Session& session, Door* door)
    : before_(session), door_(door), talk_(session.epochs()), members_(talk_.members()) {}

NextEpoch EpochEnd::next(const Value& word, std::int64_t progress, bool leaves) {
  while (true) {
    if (before_.mailbox().loss(members_, {})) members_ = talk_.next();
    value::List newcomers;
    if (door_ != nullptr && !leaves) {
      for (const int node : door_->take(static_cast<int>(members_.size())))
        newcomers.items.emplace_back(std::int64_t{node});
    }
    std::vector<Value> told;
    try {
      told = talk_.all_gather(members_, value::Tuple{{progress, number_, newcomers, leaves, word}});
    } catch (const base::PeerError&) {
      if (!before_.mailbox().loss(members_, kHeard)) throw;
      continue;
    }
    const auto said = [&](std::size_t at, std::size_t what) -> const Value& {
      return told[at].as<value::Tuple>().items.at(what);
    };
    NextEpoch next;
    std::vector<std::size_t> order;
    for (std::size_t at = 0; at < told.size(); ++at) {
      number_ = std::max(number_, said(at, 1).as<std::int64_t>());
      if (said(at, 3).as<bool>()) {
        next.leaving.push_back(members_[at]);
      } else {
        order.push_back(at);
      }
    }
    const auto progress_of = [&](std::size_t at) { return said(at, 0).as<std::int64_t>(); };
    if (!order.empty()) {
      std::rotate(order.begin(), std::ranges::max_element(order, {}, progress_of), order.end());
      std::sort(order.begin() + 1, order.end());
    }
    for (const auto at : order) {
      if (members_[at] == before_.world().rank) next.rank = static_cast<int>(next.members.size());
      const auto& there = said(at, 2).as<value::List>().items;
      if (!there.empty()) next.door = members_[at];
      for (const auto& node : there) next.newcomers.push_back(static_cast<int>(node.as<std::int64_t>()));
      next.members.push_back(members_[at]);
      next.words.push_back(said(at, 4));
    }
    next.number = ++number_;
    return next;
  }
}

std::shared_ptr<Session> EpochEnd::open(const NextEpoch& next, environment::World world, std::int64_t epoch,
                                        FaceHooks hooks) {
  auto config = before_.config();
  share_out(before_, next.size(), config);
  config.verify_steps = 0;
  return open_in(next, std::move(config), std::move(world), epoch, std::move(hooks));
}

bool EpochEnd::may_leave(const NextEpoch& next) { return next.members.empty() || talk_.begins(/*is_open=*/true); }

std::shared_ptr<Session> EpochEnd::open_in(const NextEpoch& next, config::Config config, environment::World world,
                                           std::int64_t epoch, FaceHooks hooks) {
  std::shared_ptr<Session> session;
  try {
    std::exception_ptr failure;
    try {
      session = meet(next, std::move(config), std::move(world), epoch, std::move(hooks));
    } catch (const base::PeerError&) {
      failure = std::current_exception();
    }
    if (!talk_.begins(session != nullptr)) {
      if (failure) std::rethrow_exception(failure);
      throw base::PeerError("a rank is lost while the ranks meet", std::nullopt, base::Code{"group-lost"});
    }
  } catch (...) {
    if (door_ != nullptr) door_->send_away();
    if (session != nullptr) session->close(false);
    throw;
  }
  if (door_ != nullptr) door_->let_in();
  tell_lost(next, *session);
  return session;
}

// Opens it with all others that there will be.
std::shared_ptr<Session> EpochEnd::meet(const NextEpoch& next, config::Config config, environment::World world,
                                        std::int64_t epoch, FaceHooks hooks) {
  if (next.newcomers.empty()) {
    return open_beside(before_, std::move(config), std::move(world), std::move(hooks), next.members,
                       "the ranks that are left meet");
  }
  const auto meeting = std::make_shared<bool>(true);  // the hook stays with the session
  hooks.check_interrupt = [this, &next, meeting, inner = std::move(hooks.check_interrupt)] {
    if (inner) inner();
    if (*meeting) check_newcomers(next);
  };
  if (door_ != nullptr) tell_places(next, world, epoch, config);
  auto session = open_beside(before_, std::move(config), std::move(world), std::move(hooks), next.members,
                             "the ranks and newcomers meet");
  *meeting = false;
  return session;
}

// To the launcher of this machine, which ends what is left of them: one that stands still does not end by itself.
void EpochEnd::tell_lost(const NextEpoch& next, Session& session) const {
  session.lost_hosts() = before_.lost_hosts();
  const auto& seats = before_.seats();
  const auto node = before_.world().node_rank;
  for (std::size_t place = 0; place < seats.size(); ++place) {
    const base::Rank rank(static_cast<std::int64_t>(place));
    const auto is_among = [&](const std::vector<base::Rank>& ranks) {
      return std::ranges::find(ranks, rank) != ranks.end();
    };
    if (is_among(next.members) || is_among(next.leaving)) continue;
    session.lost_hosts().push_back(seats[place].host);
    if (seats[place].node == node) environment::ProgressReporter().lost(seats[place].process);
  }
}

void EpochEnd::tell_places(const NextEpoch& next, const environment::World& world, std::int64_t epoch,
                           const config::Config& config) {
  std::vector<std::string> places;
  const auto nodes = nodes_of(before_, next);
  for (int rank = static_cast<int>(next.members.size()); rank < next.size(); ++rank) {
    NewPlace place{.rank = rank,
                   .size = next.size(),
                   .local = local_place(nodes, rank),
                   .host = world.master_addr,
                   .port = world.master_port,
                   .epoch = epoch,
                   .config = config::to_json(config),
                   .asked = config::to_json(before_.asked()),
                   .microbatches = config.all_microbatches,
                   .clips_as_shards = clips_as_shards(before_)};
    place.take_names();
    places.push_back(place.text());
  }
  door_->tell(places);
}

// The rank with the door sees to the newcomers, and has the others open the session anew where it has lost one.
void EpochEnd::check_newcomers(const NextEpoch& next) {
  auto& mailbox = before_.mailbox();
  bool lost = door_ != nullptr && door_->has_lost();
  if (lost) {
    for (const auto member : next.members) {
      if (member != mailbox.rank()) messaging::relay(mailbox, before_.transport(), member, kNewcomers, next.number);
    }
  }
  while (const auto word = door_ == nullptr ? mailbox.poll(next.door, kNewcomers) : std::nullopt) {
    lost = lost || word->as<std::int64_t>() == next.number;
  }
  if (lost) throw base::PeerError("a newcomer is lost while the ranks meet", std::nullopt, base::Code{"group-lost"});
}

}  // namespace lamina::session
