// SPDX-License-Identifier: Apache-2.0
#include "lamina/membership/member.h"

#include <algorithm>

#include "lamina/base/joined.h"
#include "lamina/base/str.h"

namespace lamina::membership {
namespace {

using enum EpochWord::Kind;

double seconds(Time time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

Member::Member(MemberId self, Epoch first, Terms terms) : self_(self), terms_(terms), epoch_(std::move(first)) {}

void Member::lost(MemberId other, Time now) {
  unreachable_.insert(other);
  if (epoch_.has(other)) lost_.insert(other);
  if (other == kWitness) give_up_witness();
  look(now);
}

void Member::opened(std::int64_t epoch, Time now) {
  has_opened_ = has_opened_ || epoch == epoch_.number;
  look(now);
}

void Member::receive(MemberId from, const EpochWord& word, Time now) {
  if (!ended_.empty()) return;
  if (word.kind == kDecided) {
    const auto& next = *word.next;
    if (next.number <= epoch_.number) return;
    if (next.members.front() == self_) tell(next);  // who decided may not reach all
    return adopt(next, now);
  }
  if (from == kWitness && word.epoch != epoch_.number) return;
  if (word.epoch < epoch_.number) {
    send(from, {.kind = kDecided, .next = epoch_});
  } else if (word.epoch > epoch_.number) {
    early_.emplace_back(from, word);
    send(from, {.kind = kWonders, .epoch = epoch_.number});
  } else {
    answer(from, word, now);
  }
}

void Member::pass(Time now) {
  if (!ended_.empty()) return;
  if (since_ && now - *since_ > terms_.patience) {
    return end(base::str("no majority of ", epoch_.text(), " has agreed on what follows for ", seconds(terms_.patience),
                         " s; lost are ", lost_.empty() ? "none" : base::joined(lost_)));
  }
  if (since_) repeat(now);
  look(now);
}

// Has all be said again, where that brought no epoch.
void Member::repeat(Time now) {
  if (answer_ && now < answer_by_) return;
  if (answer_) {
    told_.reset();
    proposal_.reset();
  }
  answer_ = answer_ ? 2 * *answer_ : terms_.answer;
  answer_by_ = now + *answer_;
}

std::vector<std::pair<MemberId, EpochWord>> Member::take_words() { return std::exchange(outgoing_, {}); }

// The first member that is not lost: this one is never lost to itself.
MemberId Member::leader() const {
  return *std::ranges::find_if(epoch_.members, [&](MemberId member) { return !lost_.contains(member); });
}

bool Member::asks_witness() const { return epoch_.with_witness > 0 && !unreachable_.contains(kWitness); }

// Others may be more, or have the first member.
bool Member::yields(const std::set<MemberId>& here, Time now) const {
  const Epoch without{epoch_.number, epoch_.members};
  return asks_witness() && !is_majority(without, here) && since_ && now - *since_ < terms_.yields;
}

// Not where this member may be one of those who have decided with it.
void Member::give_up_witness() {
  if (epoch_.with_witness == 0 || proposal_ || acceptor_.promised() != Ballot()) return;
  unreachable_.insert(kWitness);
  if (without_witness_.insert(self_).second) send_all({.kind = kGivesUp, .epoch = epoch_.number});
}

void Member::hear_giving_up(MemberId from) {
  without_witness_.insert(from);
  give_up_witness();
  const auto has_given_up = [&](MemberId member) { return without_witness_.contains(member); };
  if (std::ranges::all_of(epoch_.members, has_given_up)) epoch_.with_witness = 0;
}

// Does what is due: ends, leads, or tells the leader.
void Member::look(Time now) {
  if (!ended_.empty() || epoch_.is_over) return;
  std::set<MemberId> here(epoch_.members.begin(), epoch_.members.end());
  for (const auto member : lost_) here.erase(member);
  const auto count = here.size();
  if (asks_witness()) here.insert(kWitness);
  if (!is_majority(epoch_, here)) {
    return end(base::str(count, " of ", epoch_.text(), " are no majority, without ", base::joined(lost_),
                         epoch_.with_witness > 0 && !asks_witness() ? " and the witness" : ""));
  }
  if (lost_.empty() && !has_opened_) return;
  since_ = since_.value_or(now);
  const auto leading = leader();
  if (leading != self_) {
    proposal_.reset();
    if (lost_.empty()) return;
    const EpochWord word{.epoch = epoch_.number, .lost = lost_};
    if (told_ == std::pair(leading, word)) return;
    told_ = {leading, word};
    return send(leading, word);
  }
  if (proposal_ || (again_ && now < *again_) || yields(here, now)) return;
  propose();
}

void Member::propose() {
  again_.reset();
  greatest_ = {std::max(greatest_, acceptor_.promised()).round + 1, self_};
  proposal_.emplace().ballot = greatest_;
  send_voices({.kind = kAsks, .epoch = epoch_.number, .ballot = greatest_});
}

void Member::answer(MemberId from, const EpochWord& word, Time now) {
  switch (word.kind) {
    case kTells:
      hear(from, word);
      break;
    case kAsks:
    case kProposes:
      send(from, acceptor_.answer(word));
      break;
    case kPromises:
      if (proposal_ && word.ballot == proposal_->ballot) promised(from, word);
      break;
    case kAccepts:
      if (proposal_ && word.ballot == proposal_->ballot) accepted(from, now);
      break;
    case kRefuses:
      refused(word.ballot, now);
      break;
    case kGivesUp:
      hear_giving_up(from);
      break;
    case kDecided:
    case kWonders:  // it is decided nowhere that is known here
      break;
  }
  look(now);
}

void Member::hear(MemberId from, const EpochWord& word) {
  if (!lost_.contains(from)) lost_.insert(word.lost.begin(), word.lost.end());
}

void Member::promised(MemberId from, const EpochWord& word) {
  if (proposal_->next) return;  // a majority was enough
  proposal_->promises[from] = word;
  std::set<MemberId> promising;
  const EpochWord* latest = nullptr;
  for (const auto& [member, promise] : proposal_->promises) {
    promising.insert(member);
    if (promise.next && (latest == nullptr || latest->accepted < promise.accepted)) latest = &promise;
  }
  if (!is_majority(epoch_, promising)) return;
  proposal_->next = latest != nullptr ? latest->next : next_epoch();
  send_voices({.kind = kProposes, .epoch = epoch_.number, .ballot = proposal_->ballot, .next = proposal_->next});
}

void Member::accepted(MemberId from, Time now) {
  proposal_->acceptances.insert(from);
  if (!is_majority(epoch_, proposal_->acceptances)) return;
  const auto next = *proposal_->next;
  tell(next);
  adopt(next, now);
}

// Another leads, or thinks so. The members try again one after the other.
void Member::refused(const Ballot& greater, Time now) {
  greatest_ = std::max(greatest_, greater);
  if (!proposal_ || greater < proposal_->ballot) return;
  proposal_.reset();
  const auto place = std::ranges::find(epoch_.members, self_) - epoch_.members.begin();
  again_ = now + terms_.again * (1 + place);
}

// Where all have opened the next session, it can begin: a loss ends it as any other one.
Epoch Member::next_epoch() const {
  if (has_opened_) return {epoch_.number + 1, epoch_.members, epoch_.with_witness, /*is_over=*/true};
  Epoch next{epoch_.number + 1, {}};
  for (const auto member : epoch_.members) {
    if (!lost_.contains(member)) next.members.push_back(member);
  }
  if (!asks_witness()) return next;
  std::vector<int> machines;
  int others = 0;
  for (const auto member : next.members) {
    const auto machine = terms_.machines.find(member);
    machines.push_back(machine != terms_.machines.end() ? machine->second : --others);
  }
  next.with_witness = enough_with_witness(machines);
  return next;
}

// Tells the members of this epoch, who may be more than those of the next one.
void Member::tell(const Epoch& next) {
  for (const auto member : epoch_.members) {
    if (member != self_) send(member, {.kind = kDecided, .next = next});
  }
}

void Member::adopt(const Epoch& next, Time now) {
  if (!next.has(self_)) return end(base::str("it was counted as lost before ", next.text()));
  epoch_ = next;
  if (next.members.size() < terms_.least && !next.is_over) {
    return end(base::str(next.text(), " has fewer than the ", terms_.least, " members that the job needs"));
  }
  lost_.clear();
  for (const auto member : next.members) {
    if (unreachable_.contains(member)) lost_.insert(member);
  }
  has_opened_ = false;
  since_.reset();
  answer_.reset();
  acceptor_ = {};
  greatest_ = {};
  without_witness_.clear();
  proposal_.reset();
  again_.reset();
  told_.reset();
  if (unreachable_.contains(kWitness)) give_up_witness();
  for (const auto& [from, word] : std::exchange(early_, {})) receive(from, word, now);
  look(now);
}

void Member::send(MemberId to, EpochWord word) {
  if (to == self_ || !unreachable_.contains(to)) outgoing_.emplace_back(to, std::move(word));
}

// Its own members, this one too.
void Member::send_all(const EpochWord& word) {
  for (const auto member : epoch_.members) send(member, word);
}

// Asks all of whom a majority is to agree.
void Member::send_voices(const EpochWord& word) {
  send_all(word);
  if (asks_witness()) send(kWitness, word);
}

void Member::end(std::string why) {
  ended_ = std::move(why);
  proposal_.reset();
}

}  // namespace lamina::membership
