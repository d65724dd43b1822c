// SPDX-License-Identifier: Apache-2.0
#include "lamina/data_parallel/passes.h"

#include <algorithm>

#include "lamina/base/error.h"
#include "lamina/base/rank_list.h"

namespace lamina::data_parallel {

Passes::Passes(messaging::Mailbox& mailbox, std::vector<base::Rank> replicas, base::Patience patience,
               std::shared_ptr<value::Failures> failures)
    : mailbox_(mailbox),
      replicas_(std::move(replicas)),
      patience_(std::move(patience)),
      failures_(std::move(failures)),
      channel_(messaging::group_channel("passes", replicas_)) {}

Passes::Met Passes::meet(const Coming& coming) {
  if (!broken_) listen();
  if (broken_)
    throw base::PeerError(base::str(purpose(), " was broken off before (", *broken_, "); start the job again"),
                          std::nullopt, base::Code{"replica-broken-off"});
  const Word mine{number_, static_cast<Says>(coming.comes), updates_, coming.left_out, coming.collectives};
  say(mine);
  try {
    hear();
  } catch (const value::RemoteFailure&) {
    end_pass();
    throw;
  } catch (...) {  // the others may have begun with what they do together
    break_off(std::current_exception());
    throw;
  }
  Met met{{}, coming.collectives};
  std::string first, other;  // what one has done since the pass before, and one that has done something else
  const Word* like = nullptr;
  for (int i = 0; i < std::ssize(replicas_); ++i) {
    const auto& word = replicas_[i] == mailbox_.rank() ? mine : words_[replicas_[i]].front();
    met.collectives = std::max(met.collectives, word.collectives);
    if (word.says == Says::kHasNoData) continue;
    met.present.push_back(i);
    met.updates = met.updates || word.says == Says::kUpdates;
    if (like == nullptr) {
      like = &word;
      first = told_by(i, word);
    } else if (other.empty() && !word.is_at(*like)) {
      other = told_by(i, word);
    }
  }
  end_pass();
  if (!coming.alike || other.empty()) return met;
  throw base::DesyncError(
      base::str("the replicas of the model have come to pass ", number_ - 1, " from different iterations: ", first,
                "; ", other,
                ". One has left out, or made once more, a backward, an update or a whole iteration: let all make the "
                "same ones (a step function that fails on one fails on all), and call a model that is not to be "
                "trained under torch.no_grad()"),
      base::Code{"replica-iterations"});
}

std::string Passes::told_by(int replica, const Word& word) const {
  return base::str("replica ", replica, " (rank ", replicas_[replica], ") ",
                   word.says == Says::kUpdates ? "is about to update" : "has ended a backward", ", after ",
                   word.updates, " optimizer steps and ", word.left_out,
                   " calls of the model without a backward since the pass before");
}

void Passes::fail(const std::exception_ptr& error) {
  say({.pass = number_, .says = Says::kFailed, .failure = describe(error)});
  end_pass();
}

void Passes::break_off(const std::exception_ptr& error) {
  const auto failure = describe(error);
  say({.pass = number_, .says = Says::kBrokeOff, .failure = failure});
  end_pass();
  note_break(failure);
}

base::Patience Passes::patience() {
  auto patience = patience_;
  patience.check_interrupt = [this, interrupt = patience_.check_interrupt] {
    if (interrupt) interrupt();
    listen();
  };
  return patience;
}

std::string Passes::purpose() const { return base::str("averaging gradients over ", base::name_ranks(replicas_)); }

void Passes::end_pass() {
  ++number_;
  updates_ = 0;
}

// Words.

void Passes::say(const Word& word) {
  const auto told = word.failure ? value::to_value(*word.failure) : value::Value();
  const value::Tuple items{
      {word.pass, static_cast<std::int64_t>(word.says), word.updates, word.left_out, word.collectives, told}};
  for (const auto rank : replicas_) {
    if (rank == mailbox_.rank()) continue;
    try {
      mailbox_.tell(rank, channel_, items);
    } catch (const base::Error&) {  // of a rank that is lost: who waits for it learns of that
    }
  }
}

Passes::Word Passes::to_word(const value::Value& value) {
  const auto& items = value.as<value::Tuple>().items;
  if (items.size() != 6) throw base::FormatError("a replica's word of a pass without six parts");
  const auto number = [&](std::size_t item) { return items[item].as<std::int64_t>(); };
  if (number(1) < 0 || number(1) > static_cast<std::int64_t>(Says::kBrokeOff))
    throw base::FormatError("a replica's word of a pass that says nothing known");
  Word word{number(0), static_cast<Says>(number(1)), number(2), number(3), number(4)};
  if (word.says >= Says::kFailed) word.failure = value::to_failure(items[5]);
  return word;
}

void Passes::hear() {
  std::vector<base::Rank> awaited;
  for (const auto rank : replicas_) {
    if (rank != mailbox_.rank() && !has_come(rank)) awaited.push_back(rank);
  }
  const auto take = [this](base::Rank from, const value::Value& word) {
    words_[from].push_back(to_word(word));
    return has_come(from);
  };
  // One that has come may break off while others are awaited.
  auto patience = patience_;
  patience.check_interrupt = [this, interrupt = patience_.check_interrupt] {
    if (interrupt) interrupt();
    for (const auto rank : replicas_) {
      if (!words_[rank].empty()) listen_to(rank);
    }
  };
  messaging::MutualWaits::Scope scope(mailbox_.waits(), as_others_hear_of_it(awaited));
  const auto watched = scope.watched(patience);
  mailbox_.hear(std::move(awaited), channel_, watched, take, [this](std::span<const base::Rank> missing) {
    return purpose() + base::without({missing.begin(), missing.end()});
  });
}

// See [Note: mutual waits]: each word is a value of its channel, one for each pass.
messaging::MutualWaits::Wait Passes::as_others_hear_of_it(std::vector<base::Rank> awaited) {
  const auto lacks = [this, awaited = std::move(awaited)] {
    auto lacked = awaited;
    std::erase_if(lacked, [this](base::Rank rank) {
      const auto& words = words_[rank];
      return !words.empty() && words.back().pass >= number_;
    });
    return lacked;
  };
  return {{messaging::MutualWaits::Kind::kValue, channel_, number_ + 1}, purpose(), {}, lacks, patience_.call, nullptr};
}

// True when it has said its word of this pass, which is then the first one kept. Throws where that is a failure.
bool Passes::has_come(base::Rank rank) {
  auto& words = words_[rank];
  require_unbroken(rank);
  while (!words.empty() && words.front().pass < number_) words.pop_front();
  if (words.empty()) return false;
  if (words.front().failure) throw ended_by(rank, words.front());
  return true;
}

void Passes::listen() {
  for (const auto rank : replicas_) listen_to(rank);
}

void Passes::listen_to(base::Rank rank) {
  while (const auto word = mailbox_.poll(rank, channel_)) words_[rank].push_back(to_word(*word));
  require_unbroken(rank);
}

void Passes::require_unbroken(base::Rank rank) {
  const auto& words = words_[rank];
  const auto broke = std::ranges::find(words, Says::kBrokeOff, &Word::says);
  if (broke == words.end()) return;
  const auto word = *broke;
  words_[rank].clear();
  note_break(*word.failure);
  throw ended_by(rank, word);
}

void Passes::note_break(const value::Failure& failure) {
  if (!broken_) broken_ = base::str(failure.type, " on rank ", failure.rank, ": ", failure.message);
}

value::RemoteFailure Passes::ended_by(base::Rank rank, const Word& word) const {
  auto failure = *word.failure;
  const auto number = std::ranges::find(replicas_, rank) - replicas_.begin();
  failure.traceback += base::str(failure.traceback.empty() || failure.traceback.ends_with('\n') ? "" : "\n",
                                 "It ended pass ", word.pass, " of all replicas; replica ", number, " met it.");
  return value::RemoteFailure(std::move(failure));
}

}  // namespace lamina::data_parallel
