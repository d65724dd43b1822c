// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/survivors.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <set>
#include <typeinfo>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/joined.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/messaging/agreement.h"
#include "lamina/rendezvous/place.h"
#include "lamina/session/next_epoch.h"
#include "lamina/session/next_place.h"
#include "lamina/value/failure.h"

namespace lamina::session {
namespace {

using topology::Group;
using value::Tuple;
using value::Value;

constexpr auto kUntilHeard = std::chrono::seconds(2);  // how long a loss may take to be heard of here

std::vector<base::Rank> others(const Session& session) {
  auto ranks = session.members(Group::kWorld);
  std::erase(ranks, session.world().rank);
  return ranks;
}

}  // namespace

bool is_of_loss(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const base::PeerError&) {
    return true;
  } catch (const value::RemoteFailure& failure) {
    return failure.failure().type == c10::demangle(typeid(base::PeerError).name());
  } catch (...) {
    return false;
  }
}

std::string why_no_survivors(const Session& session, bool keeps_parts) {
  const auto& config = session.config();
  if (keeps_parts && config.tensor_parallel_degree > 1) {
    return "tensor_parallel_degree gives ranks slices, which do not go over to another layout";
  }
  const char* parts = nullptr;
  if (config.shard_optimizer_state) parts = "shard_optimizer_state";
  if (config.sharded_data_parallel_degree > 1) parts = "sharded_data_parallel_degree";
  if (config.tensor_parallel_degree > 1) parts = "tensor_parallel_degree";
  if (config.partitions > 1) parts = "partitions";
  if (parts != nullptr && !keeps_parts) {
    return base::str(parts, " gives ranks parts that no other one has, and that are lost with a rank");
  }
  if (session.topology().size(Group::kNode) < session.world().size && session.seats().empty()) {
    return "ranks of several machines know where others are under `lamina run --elastic` alone";
  }
  return config.ddp ? "" : "without ddp each rank trains by itself";
}

void tell_no_survivors(Session& session, const std::string& why) {
  const auto is_lost = [&](std::int64_t rank) {
    return session.mailbox().loss(std::array{base::Rank(rank)}, std::chrono::milliseconds(0)).has_value();
  };
  std::int64_t first = 0;
  while (first < session.world().rank.value && is_lost(first)) ++first;
  if (base::Rank(first) != session.world().rank) return;
  base::log_info("--elastic: a rank is lost, and the others end with it: " + why);
}

void tell_survivors(Session& session, std::vector<base::Rank> lost, std::int64_t step, bool is_again, double took) {
  const auto hosts = std::exchange(session.lost_hosts(), {});
  if (session.world().rank != base::Rank(0)) return;
  std::ranges::sort(lost);
  const auto machines = std::set(hosts.begin(), hosts.end());
  std::string ranks;
  for (const auto rank : lost) ranks += base::str(ranks.empty() ? "" : ", ", rank);
  const int size = session.world().size, partitions = session.config().partitions;
  std::array<char, 32> seconds{};
  std::snprintf(seconds.data(), seconds.size(), "%.1f s", took);
  base::log_info(
      base::str("lost rank", lost.size() > 1 ? "s " : " ", ranks, machines.size() > 1 ? " (machines " : " (machine ",
                machines.empty() ? rendezvous::host_name() : base::joined(machines), ") in step ", step, ": ", size,
                size > 1 ? " ranks, " : " rank, ", partitions > 1 ? base::str("partitions ", partitions, " x ") : "",
                "copies ", session.topology().size(Group::kReplicas), "; step ", step,
                is_again ? " again, " : " is done, ", seconds.data()));
}

Survivors::Survivors(CopiesFace& face) : face_(face) { keep(); }
Survivors::~Survivors() = default;

void Survivors::keep() {
  session_ = face_.session();
  if (!why_no_survivors(*session_).empty()) return;
  std::vector<Kept> before;
  before.swap(kept_);
  for (const auto& buffer : face_.buffers()) {
    const auto is_it = [&](const Kept& kept) {
      return kept.buffer.is_same(buffer) && kept.version == static_cast<std::int64_t>(buffer._version());
    };
    const auto found = std::ranges::find_if(before, is_it);
    kept_.push_back(found != before.end()
                        ? std::move(*found)
                        : Kept{buffer, buffer.detach().clone(), static_cast<std::int64_t>(buffer._version())});
  }
  seeded_ = session_->job().seeds().steps();
}

bool Survivors::may_go_on(const std::exception_ptr& error) {
  if (!is_of_loss(error) || !session_->mailbox().loss(others(*session_), kUntilHeard)) return false;
  const bool is_known = face_.session() == session_;
  const auto why = is_known ? why_no_survivors(*session_) : kChangesLayout;
  if (why.empty()) return true;
  tell_no_survivors(*session_, why);
  return false;
}

std::vector<std::int64_t> Survivors::go_on() {
  if (!since_) since_ = base::Clock::now();
  while (true) {
    auto [session, progress] = meet();
    try {
      go_over(std::move(session), progress);
      return progress;
    } catch (const base::Error&) {
      if (!may_go_on(std::current_exception())) throw;
    }
  }
}

std::pair<std::shared_ptr<Session>, std::vector<std::int64_t>> Survivors::meet() {
  EpochEnd end(*session_);
  const auto epochs = epoch_of_environment();
  while (true) {
    const auto next = [&] {
      const FreePort port(*session_);
      return end.next(Tuple{{face_.progress(), std::int64_t{port.number()}}}, is_whole_ ? face_.progress() : -1);
    }();
    if (!is_whole_ && next.rank == 0) {
      throw base::PeerError("the states of all that are left were lost with those who had them", {},
                            base::Code{"elastic-ended"});
    }
    const auto told = [&](std::size_t place, std::size_t item) {
      return next.words[place].as<Tuple>().items.at(item).as<std::int64_t>();
    };
    std::shared_ptr<Session> session;
    try {
      const auto world = next_place(*session_, next, static_cast<int>(told(0, 1)));
      take_place(world, epochs + next.number);
      session = end.open(next, std::nullopt, world, epochs + next.number, face_.hooks());
    } catch (const base::PeerError&) {
      continue;  // they agree anew
    }
    note_lost(next);
    std::vector<std::int64_t> progress;
    for (std::size_t place = 0; place < next.words.size(); ++place) progress.push_back(told(place, 0));
    return {std::move(session), std::move(progress)};
  }
}

void Survivors::note_lost(const NextEpoch& next) {
  for (const auto rank : session_->members(Group::kWorld)) {
    if (std::ranges::find(next.members, rank) == next.members.end()) lost_.push_back(rank);
  }
}

void Survivors::go_over(std::shared_ptr<Session> session, const std::vector<std::int64_t>& progress) {
  {
    const at::NoGradGuard no_grad;
    for (auto& kept : kept_) kept.buffer.copy_(kept.value);
  }
  session_ = session;
  is_whole_ = progress[static_cast<std::size_t>(session->world().rank.value)] == progress.front();
  face_.go_over(std::move(session));
  if (std::ranges::all_of(progress, [&](auto each) { return each == progress.front(); })) {
    face_.take(nullptr);
  } else {
    const auto given = messaging::made_by_first(
        session_->mailbox(), session_->members(Group::kWorld),
        [&]() -> Value { return Tuple{{face_.states(), static_cast<std::int64_t>(seeded_.value_or(0))}}; },
        session_->patience());
    face_.take(&given.as<Tuple>().items.at(0));
    if (seeded_) seeded_ = static_cast<std::uint64_t>(given.as<Tuple>().items.at(1).as<std::int64_t>());
  }
  if (seeded_) session_->job().seeds().go_on_after(*seeded_);
  is_whole_ = true;
  keep();
}

void Survivors::tell_going_on(std::int64_t step, bool is_again) {
  const auto took = base::Clock::now() - std::exchange(since_, std::nullopt).value_or(base::Clock::now());
  tell_survivors(*session_, std::exchange(lost_, {}), step, is_again, std::chrono::duration<double>(took).count());
}

}  // namespace lamina::session
