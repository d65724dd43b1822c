// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/door.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <set>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/fork_guard.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"
#include "lamina/data_parallel/newcomers.h"
#include "lamina/environment/address.h"
#include "lamina/messaging/relay.h"
#include "lamina/session/session.h"

namespace lamina::session {
namespace {

using base::Clock;
using environment::DoorPlate;
using environment::JobDoor;

constexpr auto kSays = std::chrono::milliseconds(500);  // to those who wait, each time
constexpr auto kSilent = std::chrono::seconds(2);       // who says nothing for so long is not counted
constexpr auto kComesIn = std::chrono::seconds(10);     // from the word of its place on
constexpr std::size_t kMostStrangers = 64;

constexpr auto kDoor = "door";  // the channel of words on where it is

}  // namespace

int DoorTerms::fitting(int waiting) const {
  for (int more = std::min(waiting, most - ranks); more > 0; --more) {
    if (why_not(ranks + more).empty()) return more;
  }
  return 0;
}

Door::Door(const DoorPlate& plate, const std::string& host, contact::Secret secret, Facts facts)
    : plate_(plate),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      reception_(environment::Address::local_towards(host, 1),
                 {.rank = base::Rank(0), .size = 2, .secret = secret, .generation = "door", .told = {"", ""}},
                 kMostStrangers),
      address_(reception_.address().text()),
      facts_(std::move(facts)) {
  base::close_in_forked_children(wake_.get());
  auto here = plate_.read();
  here.door = address_;
  here.is_over = false;
  plate_.write(here);
  thread_ = std::thread([this] { run(); });
}

Door::~Door() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  wake();
  thread_.join();
  data_parallel::newcomers().wait = false;
  base::keep_in_forked_children(wake_.get());
}

void Door::wake() const { ::eventfd_write(wake_.get(), 1); }

void Door::set_terms(const DoorTerms& terms) {
  const std::lock_guard lock(mutex_);
  terms_ = terms;
  admission_.set_every(terms.every);
  count();
}

std::vector<Entrant> Door::present() const {
  std::vector<Entrant> all;
  for (const auto& guest : waiting_) {
    if (Clock::now() - guest.heard < kSilent) all.push_back(guest.entrant);
  }
  return all;
}

void Door::count() {
  const auto all = present();
  has_waiting_ =
      taken_.empty() && terms_.fitting(static_cast<int>(all.size())) > 0 && admission_.may_enter(all, Clock::now());
  data_parallel::newcomers().wait = has_waiting_.load();
}

// Refuses those who differ from the job.
void Door::compare() {
  for (auto& guest : waiting_) {
    const auto why = difference(facts_, guest.facts);
    if (why.empty()) continue;
    guest.line.say(DoorWord::kRefused, why);
    guest.is_gone = true;
  }
  std::erase_if(waiting_, [](const Guest& guest) { return guest.is_gone; });
}

std::vector<int> Door::take(int ranks) {
  std::optional<Facts> facts;
  if (has_waiting() && terms_.facts) facts = terms_.facts();  // of whoever calls, as the terms are
  const std::lock_guard lock(mutex_);
  waiting_.splice(waiting_.begin(), taken_);
  if (facts) facts_ = *std::move(facts);
  compare();
  auto terms = terms_;
  terms.ranks = ranks;
  const int fitting = terms.fitting(static_cast<int>(present().size()));
  for (auto at = waiting_.begin(); at != waiting_.end() && std::ssize(taken_) < fitting;) {
    const auto guest = at++;
    if (Clock::now() - guest->heard < kSilent) taken_.splice(taken_.end(), waiting_, guest);
  }
  count();
  std::vector<int> nodes;
  for (const auto& guest : taken_) nodes.push_back(guest.entrant.node);
  return nodes;
}

void Door::tell(const std::vector<std::string>& places) {
  const std::lock_guard lock(mutex_);
  auto place = places.begin();
  for (auto& guest : taken_) guest.is_gone = !guest.line.say(DoorWord::kPlace, *place++);
  in_by_ = base::Deadline::after(kComesIn);
}

bool Door::has_lost() {
  const std::lock_guard lock(mutex_);
  return in_by_ && (in_by_->expired() || std::ranges::any_of(taken_, &Guest::is_gone));
}

void Door::let_in() {
  const std::lock_guard lock(mutex_);
  std::vector<Entrant> entered;
  for (auto& guest : taken_) {
    guest.line.say(DoorWord::kIn);
    entered.push_back(guest.entrant);
  }
  admission_.entered(entered, Clock::now());
  taken_.clear();
  in_by_.reset();
  count();
}

void Door::send_away() {
  const std::lock_guard lock(mutex_);
  if (in_by_) {
    for (auto& guest : taken_) guest.line.say(DoorWord::kAgain);
    taken_.clear();
  }
  in_by_.reset();
  count();
}

void Door::end() {
  const std::lock_guard lock(mutex_);
  plate_.write_over();
  for (auto& guest : waiting_) guest.line.say(DoorWord::kOver);
  waiting_.clear();
  terms_.most = 0;
  count();
}

void Door::run() {
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
  while (true) {
    std::vector<pollfd> polled{{wake_.get(), POLLIN, 0}};
    for (const auto& [fd, events] : reception_.awaited()) polled.push_back({fd, events, 0});
    {
      const std::lock_guard lock(mutex_);
      if (ends_) return;
      for (const auto* guests : {&waiting_, &taken_}) {
        for (const auto& guest : *guests) {
          if (!guest.is_gone) polled.push_back({guest.line.fd(), POLLIN, 0});
        }
      }
    }
    ::poll(polled.data(), polled.size(), static_cast<int>(kSays.count()));
    try {
      for (auto& connection : reception_.take()) receive(std::move(connection));
      const std::lock_guard lock(mutex_);
      hear(waiting_);
      hear(taken_);
      std::erase_if(waiting_, [](const Guest& guest) { return guest.is_gone; });
      tell_waiting();
      count();
    } catch (const base::Error& error) {
      base::log_warning(base::str("newcomers cannot join for now: ", error.what()));
      std::this_thread::sleep_for(kSays);
    }
  }
}

void Door::receive(contact::Connection connection) {
  Guest guest{.line = DoorLine(std::move(connection)), .facts = {}, .entrant = {}, .heard = Clock::now()};
  try {
    guest.facts = to_facts(guest.line.told());
    guest.entrant = take_entrant(guest.facts);
    guest.entrant.came = guest.heard;
  } catch (const base::FormatError&) {
    guest.line.say(DoorWord::kRefused, "what it tells of itself cannot be read");
    return;
  }
  const std::lock_guard lock(mutex_);
  waiting_.push_back(std::move(guest));
  compare();
  said_ = {};
}

void Door::hear(std::list<Guest>& guests) {
  for (auto& guest : guests) {
    if (guest.is_gone) continue;
    const auto knocks = guest.line.hear_knocks();
    guest.is_gone = !knocks;
    if (knocks.value_or(0) > 0) guest.heard = Clock::now();
  }
}

void Door::tell_waiting() {
  if (Clock::now() - said_ < kSays) return;
  said_ = Clock::now();
  const auto waiting = static_cast<int>(waiting_.size());
  std::string why;
  if (terms_.ranks >= terms_.most) {
    why = base::str("the job has as many ranks as --elastic allows it: ", terms_.ranks);
  } else if (terms_.fitting(waiting) == 0) {
    why = terms_.why_not(terms_.ranks + 1);
  }
  for (auto& guest : waiting_) guest.is_gone = !guest.line.say(DoorWord::kWait, why);
  std::erase_if(waiting_, [](const Guest& guest) { return guest.is_gone; });
}

void tell_door(Session& session, const Door& door) {
  const auto& seats = session.seats();
  const auto plate = DoorPlate::of_environment();
  if (!plate) return;
  JobDoor here{.door = door.address()};
  for (const auto& seat : seats) {
    if (seat.launcher.empty() || std::ranges::find(here.launchers, seat.launcher) != here.launchers.end()) continue;
    here.launchers.push_back(seat.launcher);
  }
  plate->write(here);
  std::set<int> told{session.world().node_rank};
  for (std::size_t rank = 0; rank < seats.size(); ++rank) {
    if (!told.insert(seats[rank].node).second) continue;
    messaging::relay(session.mailbox(), session.transport(), base::Rank(static_cast<std::int64_t>(rank)), kDoor,
                     here.text());
  }
}

void hear_of_door(Session& session) {
  const base::Rank first(0);
  if (session.world().rank == first) return;
  while (const auto word = session.mailbox().poll(first, kDoor)) {
    if (const auto plate = DoorPlate::of_environment()) plate->write(JobDoor::read(word->as<std::string>()));
  }
}

void end_door(const Session& session) {
  const auto plate = DoorPlate::of_environment();
  if (plate && session.topology().size(topology::Group::kNode) < session.world().size) plate->write_over();
}

}  // namespace lamina::session
