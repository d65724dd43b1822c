// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/mutual_waits.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "lamina/base/deadline.h"
#include "lamina/base/rank_list.h"
#include "lamina/base/str.h"
#include "lamina/faces/sayings.h"
#include "lamina/messaging/spread.h"

namespace lamina::messaging {
namespace {

using base::Clock;
using value::List;
using value::Tuple;
using value::Value;

constexpr auto kMoment = std::chrono::milliseconds(500);  // a shorter wait is told to nobody
// How long a thread that waits may be away from its wait, in what it does meanwhile, until that counts as a new one.
constexpr auto kAway = std::chrono::milliseconds(400);
// How long the others of a circle may take to give up: each looks every base::kInterruptSlice.
constexpr auto kAllGiveUp = std::chrono::seconds(1);

enum class Tag : std::int64_t { kPath, kGivenUp, kLeft, kAnswer };

Value to_value(Tag tag) { return static_cast<std::int64_t>(tag); }

void add(std::vector<base::Rank>& ranks, const std::vector<base::Rank>& more) {
  ranks.insert(ranks.end(), more.begin(), more.end());
  std::ranges::sort(ranks);
  ranks.erase(std::ranges::unique(ranks).begin(), ranks.end());
}

bool holds(const WaitPath& path, base::Rank rank) {
  return std::ranges::any_of(path, [&](const auto& told) { return told.rank == rank; });
}

transport::Message message_of(base::Rank self, Value body) {
  transport::Message message;
  message.kind = kWait;
  message.call.origin = self;
  message.body = std::move(body);
  return message;
}

// Tells those after `rank` on the tree of a word for all ([Note: spreading]), and in the place of one that is lost
// those after it.
void pass_on(transport::Transport& transport, const transport::Message& word, base::Rank rank) {
  std::vector<base::Rank> ranks;
  for (int i = 0; i < transport.size(); ++i) ranks.emplace_back((word.call.origin.value + i) % transport.size());
  for (const auto next : spread(ranks, rank).to) {
    try {
      transport.tell(next, word);
    } catch (const base::Error&) {
      pass_on(transport, word, next);
    }
  }
}

// Two ranks that wait in one operation of a group wait for the same others: what one of them lacks, both do.
bool shared(const WaitOperation& mine, const WaitOperation& other) {
  return mine.kind != WaitKind::kValue && mine == other;
}

}  // namespace

MutualWaits::MutualWaits(transport::Transport& transport, Handlers& handlers) : transport_(transport) {
  handlers.on(kWait, [this](transport::Message&& message) { receive(message); });
}

void MutualWaits::keep(WaitKind kind, Keeper keeper) { keepers_[kind] = std::move(keeper); }

void MutualWaits::keep_steps(StepHooks steps) { steps_ = std::move(steps); }

MutualWaits::Scope::Scope(MutualWaits& waits, Wait wait)
    : waits_(waits),
      wait_(std::move(wait)),
      serial_(++waits.serials_),
      role_(waits.steps_.role ? waits.steps_.role() : Role::kOutside),
      since_(Clock::now()),
      checked_(since_),
      exceptions_(std::uncaught_exceptions()) {
  std::lock_guard guard(waits_.mutex_);
  auto* const around = waits_.current_;
  const bool is_beside = around != nullptr && around->thread_ != thread_;
  const bool is_in_step = is_beside && role_ == Role::kInTurn && around->wait_.operation.kind == WaitKind::kStep;
  if (is_beside && !is_in_step) {
    for (auto* each = around; each != nullptr; each = each->outer_) {
      if (each->role_ != Role::kInTurn || role_ != Role::kOutOfTurn) each->alone_ = false;
    }
    return;
  }
  attempt_ = waits_.attempt_at(wait_.operation);
  alone_ = around == nullptr || is_in_step || around->alone_;
  outer_ = std::exchange(waits_.current_, this);
}

MutualWaits::Scope::~Scope() {
  {
    std::lock_guard guard(waits_.mutex_);
    auto** place = &waits_.current_;
    while (*place != nullptr && *place != this) place = &(*place)->outer_;
    if (*place == nullptr) return;
    *place = outer_;  // that of the step may end before that of a thread of it
  }
  waits_.note_waiting(false);
  if (std::uncaught_exceptions() == exceptions_) waits_.withdraw_answers();
}

void MutualWaits::Scope::check() {
  {
    std::lock_guard guard(waits_.mutex_);
    if (!given_up_ && (!alone_ || waits_.current_ != this)) return;
  }
  const auto now = Clock::now();
  if (now - checked_ > kAway) since_ = now;
  checked_ = now;
  waits_.check(*this);
}

base::Patience MutualWaits::Scope::watched(const base::Patience& patience) {
  base::Patience watched = patience;
  watched.check_interrupt = [this, interrupt = patience.check_interrupt] {
    if (interrupt) interrupt();
    check();
  };
  return watched;
}

Awaited MutualWaits::Scope::awaited(const std::vector<base::Rank>& lacked) const {
  Awaited awaited;
  for (const auto rank : lacked) {
    const auto found = answers_.find(rank);
    const auto& [serial, place, others] = found == answers_.end() ? WaitAnswer() : found->second;
    if (place == WaitAnswer::Place::kDone) continue;
    const bool waits = !others.last.empty();
    add(awaited.absent, waits && place == WaitAnswer::Place::kInIt ? others.absent : std::vector{rank});
    add(awaited.last, waits ? others.last : std::vector{rank});
  }
  return awaited;
}

void MutualWaits::check(Scope& scope) {
  if (scope.wait_.only_answers) return answer(scope, scope.wait_.lacks());
  std::optional<WaitPath> given_up;
  std::map<std::pair<base::Rank, base::Rank>, Heard> heard;
  {
    // Both at once: a rank that has given up may have told of its next wait since, to which this one adds nothing.
    std::lock_guard guard(mutex_);
    given_up = scope.given_up_;
    heard.swap(heard_);
    for (auto* each = &scope; each != nullptr; each = each->outer_) {
      if (each->thread_ != scope.thread_) continue;  // which takes its own
      std::erase_if(answers_, [&](const auto& heard) {
        const bool is_for_it = heard.second.serial == each->serial_;
        if (is_for_it) each->answers_[heard.first] = heard.second;
        return is_for_it;
      });
    }
  }
  if (given_up) give_up(scope, *given_up);
  const auto lacked = scope.wait_.lacks();
  for (auto& [ends, each] : heard) {
    if (has_come(each.path.back())) continue;
    if (const auto circle = follow(scope, each, lacked)) give_up(scope, *circle);
    std::lock_guard guard(mutex_);
    heard_.try_emplace(ends, std::move(each));  // unless a newer one has come
  }
  answer(scope, lacked);
  const bool is_long = Clock::now() - scope.since_ >= kMoment;
  note_waiting(is_long && !(scope.wait_.computes && scope.wait_.computes()));
  if (is_long) tell(scope, lacked);
}

void MutualWaits::note_waiting(bool waits) {
  if (is_waiting_.exchange(waits) != waits && tell_waiting_) tell_waiting_(waits);
}

// Says for whom this rank waits to each one that waits for it; again where that changes.
void MutualWaits::answer(Scope& scope, const std::vector<base::Rank>& lacked) {
  std::map<base::Rank, WaitReport> asking;
  {
    std::lock_guard guard(mutex_);
    asking = asking_;
  }
  if (asking.empty()) return;
  const auto awaited = scope.awaited(scope.wait_.absent ? scope.wait_.absent() : lacked);
  for (const auto& [rank, told] : asking) {
    const auto answer = answer_to(told, scope, awaited);
    if (!answer) continue;
    {
      std::lock_guard guard(mutex_);
      if (std::exchange(given_[rank], *answer) == *answer) continue;
    }
    send(rank, Tuple{{to_value(Tag::kAnswer), to_value(*answer)}});
  }
}

std::optional<WaitAnswer> MutualWaits::answer_to(const WaitReport& told, const Scope& scope, const Awaited& awaited) {
  const bool is_in_it = shared(scope.wait_.operation, told.operation);
  if (told.operation.kind == WaitKind::kGroup) {
    if (is_in_it) return std::nullopt;  // which members hear of each other: see [Note: presence]
    if (has_come(told)) return WaitAnswer{told.serial, WaitAnswer::Place::kDone, {}};
  } else if (!is_in_it && has_come(told)) {
    return std::nullopt;
  }
  auto others = awaited;
  std::erase(others.last, told.rank);  // that is a circle, which paths tell of
  return WaitAnswer{told.serial, is_in_it ? WaitAnswer::Place::kInIt : WaitAnswer::Place::kElsewhere,
                    std::move(others)};
}

void MutualWaits::withdraw_answers() {
  std::vector<std::pair<base::Rank, std::int64_t>> withdrawn;
  {
    std::lock_guard guard(mutex_);
    std::erase_if(given_, [&](const auto& given) {
      const auto& [rank, answer] = given;
      if (answer.place == WaitAnswer::Place::kDone) return false;  // as it stays
      withdrawn.emplace_back(rank, answer.serial);
      return true;
    });
  }
  for (const auto& [rank, serial] : withdrawn)
    send(rank, Tuple{{to_value(Tag::kAnswer), to_value(WaitAnswer{.serial = serial})}});
}

void MutualWaits::tell(Scope& scope, const std::vector<base::Rank>& lacked) {
  for (auto rank : lacked) {
    if (scope.told_.insert(rank).second)
      send(rank, Tuple{{to_value(Tag::kPath), to_value(WaitPath{story(scope, lacked)})}});
  }
}

std::optional<WaitPath> MutualWaits::follow(Scope& scope, Heard& heard, const std::vector<base::Rank>& lacked) {
  const WaitReport& first = heard.path.front();
  if (first.rank == transport_.rank()) {
    const auto next = heard.path.size() > 1 ? heard.path[1].rank : first.rank;
    const bool still_lacks = std::ranges::find(lacked, next) != lacked.end() || scope.lacked_by_others_.contains(next);
    return first.serial == scope.serial_ && still_lacks ? std::optional(heard.path) : std::nullopt;
  }
  if (shared(scope.wait_.operation, first.operation)) {
    if (heard.path.size() > 1) {
      scope.lacked_by_others_.insert(heard.path[1].rank);
      tell(scope, {heard.path[1].rank});
    }
    return std::nullopt;
  }
  if (holds(heard.path, transport_.rank())) return std::nullopt;
  if (std::exchange(heard.extended_in, scope.serial_) != scope.serial_) heard.extended_to.clear();
  for (auto rank : lacked) {
    if (!heard.extended_to.insert(rank).second) continue;
    WaitPath longer = heard.path;
    longer.push_back(story(scope, lacked));
    send(rank, Tuple{{to_value(Tag::kPath), to_value(longer)}});
  }
  return std::nullopt;
}

// Takes part in what rank `by` has given up at once: what it does next may have the number of this operation.
void MutualWaits::end_elsewhere(const WaitPath& circle, const WaitReport& by) {
  for (auto* scope = current_; scope != nullptr; scope = scope->outer_) {
    const bool mine = std::ranges::any_of(circle, [&](const WaitReport& told) {
      return told.rank == transport_.rank() && told.serial == scope->serial_;
    });
    // A step that one rank had given up before it was announced may since be another, which has that number.
    const bool same = shared(scope->wait_.operation, by.operation) && by.around.has_value() == around().has_value();
    const bool earlier = by.attempt < scope->attempt_;
    if (!scope->alone_ || !(mine || (same && !earlier))) continue;
    scope->given_up_ = circle;
    return withdraw(*scope);
  }
}

void MutualWaits::withdraw(Scope& scope) {
  if (!std::exchange(scope.withdrawn_, true) && scope.wait_.give_up) scope.wait_.give_up();
}

std::int64_t MutualWaits::attempt_at(const WaitOperation& operation) const {
  const auto found = last_given_up_.find({operation.kind, operation.key});
  return found != last_given_up_.end() && found->second.operation == operation ? found->second.attempt + 1 : 0;
}

void MutualWaits::count_given_up(const WaitReport& told) {
  const auto [latest, first] = last_given_up_.try_emplace({told.operation.kind, told.operation.key}, told);
  const auto age = [](const WaitReport& each) { return std::pair(each.operation.number, each.attempt); };
  if (age(latest->second) < age(told)) latest->second = told;
}

void MutualWaits::give_up(Scope& scope, const WaitPath& circle) {
  const auto mine = story(scope, scope.wait_.lacks());
  {
    std::lock_guard guard(mutex_);
    withdraw(scope);
    count_given_up(mine);
  }
  std::set<base::Rank> others(scope.wait_.members.begin(), scope.wait_.members.end());
  for (const auto& told : circle) others.insert(told.rank);
  others.erase(transport_.rank());
  for (auto rank : others) send(rank, Tuple{{to_value(Tag::kGivenUp), to_value(circle), to_value(mine)}});
  await_others(circle);
  withdraw_answers();  // all may go on
  for (const auto& told : circle) {
    if (told.around && steps_.ended) steps_.ended(*told.around);
  }
  throw base::DesyncError(text_of(circle), base::Code{"step-mutual-wait"});
}

void MutualWaits::await_others(const WaitPath& circle) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kAllGiveUp, [&] {
    return std::ranges::all_of(circle, [&](const WaitReport& told) {
      const auto found = gave_up_.find(told.rank);
      return told.rank == transport_.rank() || (found != gave_up_.end() && found->second >= told.serial);
    });
  });
}

bool MutualWaits::has_come(const WaitReport& told) {
  const auto keeper = keepers_.find(told.operation.kind);
  return keeper == keepers_.end() || keeper->second.has_come(told.operation, told.rank);
}

std::optional<WaitOperation> MutualWaits::around() const { return steps_.begun ? steps_.begun() : std::nullopt; }

WaitReport MutualWaits::story(Scope& scope, const std::vector<base::Rank>& lacked) {
  if (scope.call_.name.empty() && scope.wait_.call) scope.call_ = scope.wait_.call();
  const auto& [name, where, part] = scope.call_;
  auto words = base::str("rank ", transport_.rank(), " waits in ", name.empty() ? scope.wait_.what : name,
                         where.empty() ? "" : " at ", where);
  const auto absent = scope.awaited(lacked).absent;
  if (!absent.empty()) words += base::str(" for ", base::name_ranks(absent));
  return {transport_.rank(), scope.serial_, scope.wait_.operation, scope.attempt_, around(), std::move(words)};
}

void MutualWaits::tell_leaving(const std::string& words) {
  pass_on(transport_, message_of(transport_.rank(), Tuple{{to_value(Tag::kLeft), words}}), transport_.rank());
}

std::string MutualWaits::left(base::Rank rank) {
  std::lock_guard guard(mutex_);
  const auto found = left_.find(rank);
  return found == left_.end() ? "" : found->second;
}

void MutualWaits::send(base::Rank to, Value body) {
  try {
    transport_.tell(to, message_of(transport_.rank(), std::move(body)));
  } catch (const base::Error&) {  // of a rank that is lost, others tell
  }
}

void MutualWaits::receive(const transport::Message& message) {
  const auto& items = message.body.as<Tuple>().items;
  switch (static_cast<Tag>(items.at(0).as<std::int64_t>())) {
    case Tag::kPath: {
      Heard heard{to_wait_path(items.at(1)), -1, {}};
      if (heard.path.empty()) return;
      std::lock_guard guard(mutex_);
      if (heard.path.back().rank == message.call.origin) {
        asking_.insert_or_assign(message.call.origin, heard.path.back());
      }
      heard_[{heard.path.front().rank, heard.path.back().rank}] = std::move(heard);
      return;
    }
    case Tag::kGivenUp: {
      const auto circle = to_wait_path(items.at(1));
      const auto by = to_wait_report(items.at(2));
      const auto keeper = keepers_.find(by.operation.kind);
      if (keeper != keepers_.end() && keeper->second.given_up) keeper->second.given_up(by.operation, by.rank);
      {
        std::lock_guard guard(mutex_);
        auto& serial = gave_up_[by.rank];
        serial = std::max(serial, by.serial);
        end_elsewhere(circle, by);
        count_given_up(by);
      }
      changed_.notify_all();
      return;
    }
    case Tag::kAnswer: {
      std::lock_guard guard(mutex_);
      answers_[message.call.origin] = to_wait_answer(items.at(1));
      return;
    }
    case Tag::kLeft: {
      {
        std::lock_guard guard(mutex_);
        left_[message.call.origin] = items.at(1).as<std::string>();
      }
      return pass_on(transport_, message, transport_.rank());
    }
  }
}

}  // namespace lamina::messaging
