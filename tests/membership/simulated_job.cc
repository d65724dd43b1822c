// SPDX-License-Identifier: Apache-2.0
#include "tests/membership/simulated_job.h"

#include <algorithm>

namespace lamina::membership::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr Time kSilent = seconds(1);  // after which a frozen member counts as lost
constexpr Time kEnd = seconds(300);

}  // namespace

SimulatedJob::SimulatedJob(std::uint64_t seed, int members, Terms terms) : random_(seed), terms_(terms) {
  Epoch first;
  std::vector<int> machines;
  for (int i = 0; i < members; ++i) {
    first.members.emplace_back(i);
    if (!terms.machines.empty()) machines.push_back(terms.machines.at(MemberId(i)));
  }
  if (!machines.empty()) {
    first.with_witness = enough_with_witness(machines);
    witness_.emplace();
  }
  for (const auto id : first.members) add(id, std::make_unique<Member>(id, first, terms_));
  seen_[0].emplace(first.text(), false);
}

void SimulatedJob::add(MemberId id, std::unique_ptr<Member> member) {
  processes_[id].member = std::move(member);
  tick(id);
}

void SimulatedJob::trouble(const Troubles& troubles) {
  dies_in_a_message_ = troubles.dies_in_a_message;
  words_lost_ = troubles.words_lost;
  const auto some = [&](int count, const std::function<void()>& happens) {
    for (int i = 0; i < count; ++i) at(duration(0, troubles.within_s), happens);
  };
  some(troubles.deaths, [this] { kill(any()); });
  some(troubles.openings, [this] { open(random_() % 4 == 0 ? std::optional(any()) : std::nullopt); });
  some(troubles.freezes, [this] { freeze(any()); });
  some(troubles.broken_links, [this] { break_link(any(), any()); });
  some(troubles.machines_lost, [this] {
    if (const auto machine = terms_.machines.find(any()); machine != terms_.machines.end()) {
      lose_machine(machine->second);
    }
  });
  some(troubles.witness_deaths, [this] { kill_witness(); });
  some(troubles.witness_links, [this] { break_link(any(), kWitness); });
  some(troubles.splits, [this] {
    std::set<MemberId> side;
    if (witness_ && random_() % 2 == 0) side.insert(kWitness);
    for (const auto id : all()) {
      if (random_() % 2 == 0) side.insert(id);
    }
    split(side);
  });
}

bool SimulatedJob::run() {
  while (!events_.empty() && now_ < kEnd) {
    const bool rests = awaited_ == 0 &&
                       std::ranges::none_of(all(), [&](MemberId id) { return works(id) && member(id).is_changing(); });
    if (rests && now_ > seconds(6)) return true;
    const Event event = events_.top();
    events_.pop();
    now_ = event.time;
    event.act();
  }
  return events_.empty();  // all have ended
}

void SimulatedJob::kill(MemberId id) {
  auto& process = processes_.at(id);
  if (std::exchange(process.dead, true)) return;
  for (const auto other : all()) {
    if (other != id && !process.closed.contains(other)) hear_of_end(id, other);
  }
}

void SimulatedJob::kill_witness() {
  if (!witness_) return;
  witness_.reset();
  for (const auto id : all()) {
    if (!processes_.at(id).closed.contains(kWitness)) hear_of_end(kWitness, id);
  }
}

void SimulatedJob::lose_machine(int machine) {
  for (const auto& [id, its] : terms_.machines) {
    if (its == machine) kill(id);
  }
}

void SimulatedJob::split(const std::set<MemberId>& side) {
  auto everybody = all();
  if (witness_) everybody.push_back(kWitness);
  for (const auto one : everybody) {
    for (const auto other : everybody) {
      if (side.contains(one) && !side.contains(other)) break_link(one, other);
    }
  }
}

void SimulatedJob::open(std::optional<MemberId> fails) {
  const int which = openings_++;
  for (const auto id : all()) {
    if (id == fails) continue;
    at(now_ + duration(0, 0.1), [this, id, which] {
      in(id, [this, id, which] {
        const auto& its = *processes_.at(id).member;
        if (its.is_changing() || its.epoch().is_over) return;
        const Opening opening(its.epoch().number, which);
        opened_[opening].insert(id);
        for (const auto other : its.epoch().members) {
          deliver(id, other, [this, id, other, opening] { hear_of_opening(id, other, opening); });
        }
      });
    });
  }
}

void SimulatedJob::hear_of_opening(MemberId from, MemberId by, const Opening& opening) {
  auto& process = processes_.at(by);
  auto& heard = process.opened[opening];
  heard.insert(from);
  const auto& epoch = process.member->epoch();
  const bool is_everywhere = std::ranges::all_of(epoch.members, [&](MemberId id) { return heard.contains(id); });
  if (is_everywhere) act(by, [&](Member& member) { member.opened(opening.first, now_); });
}

bool SimulatedJob::is_over() const {
  return std::ranges::any_of(seen_, [](const auto& each) { return each.second.begin()->second; });
}

bool SimulatedJob::all_opened() const {
  return std::ranges::all_of(processes_, [&](const auto& process) {
    const auto& epoch = process.second.member->epoch();
    return !epoch.is_over || std::ranges::any_of(opened_, [&](const auto& opening) {
      const auto has = [&](MemberId id) { return opening.second.contains(id); };
      return opening.first.first == epoch.number - 1 && std::ranges::all_of(epoch.members, has);
    });
  });
}

std::vector<MemberId> SimulatedJob::all() const {
  std::vector<MemberId> ids;
  for (const auto& [id, process] : processes_) ids.push_back(id);
  return ids;
}

bool SimulatedJob::works(MemberId id) const { return !processes_.at(id).dead; }

std::vector<MemberId> SimulatedJob::living() const {
  auto ids = all();
  std::erase_if(ids, [&](MemberId id) { return !works(id); });
  return ids;
}

MemberId SimulatedJob::any() {
  const auto ids = all();
  return ids[random_() % ids.size()];
}

Time SimulatedJob::duration(double least_s, double most_s) {
  const std::chrono::duration<double> drawn(std::uniform_real_distribution<>(least_s, most_s)(random_));
  return std::chrono::duration_cast<Time>(drawn);
}

void SimulatedJob::at(Time time, std::function<void()> what) {
  ++awaited_;
  events_.push({std::max(time, now_), numbers_++, [this, what = std::move(what)] {
                  --awaited_;
                  what();
                }});
}

void SimulatedJob::tick(MemberId id) {
  const bool hurries = member(id).is_changing();
  events_.push({now_ + (hurries ? milliseconds(10) : milliseconds(250)), numbers_++, [this, id] {
                  if (!works(id)) return;
                  if (!processes_.at(id).frozen) act(id, [this](Member& member) { member.pass(now_); });
                  if (works(id)) tick(id);
                }});
}

void SimulatedJob::freeze(MemberId id) {
  auto& process = processes_.at(id);
  if (process.dead || std::exchange(process.frozen, true)) return;
  const auto thaw = now_ + duration(0, 4);
  for (const auto other : all()) {
    if (other == id || now_ + kSilent > thaw) continue;
    at(now_ + kSilent + duration(0, 0.5), [this, id, other] {
      if (processes_.at(id).frozen) hear_of_end(id, other);
    });
  }
  at(thaw, [this, id] {
    auto& thawed = processes_.at(id);
    thawed.frozen = false;
    for (const auto& each : std::exchange(thawed.later, {})) in(id, each);
  });
}

void SimulatedJob::break_link(MemberId one, MemberId other) {
  if (one == other || !broken_.insert({one, other}).second) return;
  broken_.insert({other, one});
  hear_of_end(one, other);
  hear_of_end(other, one);
}

// `by` hears that `of` is gone, behind the words that are on their way.
void SimulatedJob::hear_of_end(MemberId of, MemberId by) {
  if (by == kWitness) return;
  auto& last = last_[{of, by}];
  last = std::max(last, now_ + duration(0, 0.5));
  at(last, [this, of, by] {
    in(by, [this, of, by] {
      if (!processes_.at(by).closed.insert(of).second) return;
      act(by, [this, of](Member& member) { member.lost(of, now_); });
      hear_of_end(by, of);  // which sees its end of the connection closed
    });
  });
}

// Does something in a process, when it is not frozen.
void SimulatedJob::in(MemberId id, std::function<void()> what) {
  auto& process = processes_.at(id);
  if (process.dead) return;
  if (process.frozen) return process.later.push_back(std::move(what));
  what();
}

void SimulatedJob::act(MemberId id, const std::function<void(Member&)>& what) {
  auto& process = processes_.at(id);
  if (process.dead) return;
  auto& member = *process.member;
  what(member);
  seen_[member.epoch().number].emplace(member.epoch().text(), member.epoch().is_over);
  auto words = member.take_words();
  const bool dies = std::bernoulli_distribution(dies_in_a_message_)(random_);
  if (dies && !words.empty()) words.resize(random_() % words.size());
  for (auto& [to, word] : words) deliver(id, to, std::move(word));
  if (dies || !member.ended().empty()) kill(id);
}

void SimulatedJob::deliver(MemberId from, MemberId to, EpochWord word) {
  if (to == kWitness) return deliver(from, to, [this, from, word = std::move(word)] { ask_witness(from, word); });
  deliver(from, to, [this, from, to, word = std::move(word)] {
    act(to, [&](Member& member) { member.receive(from, word, now_); });
  });
}

void SimulatedJob::deliver(MemberId from, MemberId to, std::function<void()> arrive) {
  if (broken_.contains({from, to})) return;
  const auto arrives = now_ + (from == to ? Time(1) : duration(0.0001, 0.02));
  auto last = arrives;
  if (words_lost_ == 0) {
    last = last_[{from, to}] = std::max(last_[{from, to}] + Time(1), arrives);
  } else if (from != to && std::bernoulli_distribution(words_lost_)(random_)) {
    return;
  }
  at(last, [this, from, to, arrive = std::move(arrive)] {
    if (broken_.contains({from, to})) return;
    if (to == kWitness) return arrive();
    in(to, [this, from, to, arrive] {
      if (!processes_.at(to).closed.contains(from)) arrive();
    });
  });
}

void SimulatedJob::ask_witness(MemberId from, const EpochWord& word) {
  if (witness_) deliver(kWitness, from, *witness_->answer(0, word));
}

}  // namespace lamina::membership::testing
