// SPDX-License-Identifier: Apache-2.0
#include "lamina/data_parallel/passes.h"

#include <algorithm>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/rank_list.h"
#include "lamina/data_parallel/newcomers.h"
#include "lamina/runtime/execution_context.h"
#include "lamina/value/numbers.h"

namespace lamina::data_parallel {
namespace {

constexpr auto kPasses = "passes", kSamples = "samples";

}  // namespace

Newcomers& newcomers() {
  static Newcomers newcomers;
  return newcomers;
}

Passes::Passes(messaging::Mailbox& mailbox, std::vector<base::Rank> replicas, base::Patience patience,
               std::shared_ptr<value::Failures> failures)
    : mailbox_(mailbox),
      replicas_(std::move(replicas)),
      patience_(std::move(patience)),
      failures_(std::move(failures)),
      channel_(messaging::group_channel("passes that end", replicas_)) {}

Passes::Met Passes::meet(const Coming& coming) {
  require_whole();
  Come all;
  try {
    all = exchange(come(coming));
  } catch (const value::RemoteFailure&) {
    end_pass();
    throw;
  } catch (...) {  // the others may have begun with what they do together
    break_off(std::current_exception());
    throw;
  }
  end_pass();
  if (coming.alike && !all.other.empty()) {
    throw base::DesyncError(
        base::str("the replicas of the model have come to pass ", number_ - 1, " from different iterations: ", all.who,
                  all.did, "; ", all.other,
                  ". One has left out, or made once more, a backward, an update or a whole iteration: let all make the "
                  "same ones (a step function that fails on one fails on all), and call a model that is not to be "
                  "trained under torch.no_grad()"),
        base::Code{"replica-iterations"});
  }
  tell_same_batch(std::move(all.batches));
  if (all.newcomers) newcomers().heard = true;
  Met met{{}, all.collectives, all.updates};
  for (int i = 0; i < std::ssize(replicas_); ++i) {
    if (std::ranges::find(all.without_data, i) == all.without_data.end()) met.present.push_back(i);
  }
  return met;
}

// On purpose or not, it is no error: the replicas then do the work of one.
void Passes::tell_same_batch(std::vector<std::int64_t> batches) const {
  std::ranges::sort(batches);
  if (mailbox_.rank().value != 0 || std::ranges::find(batches, kSharedBatch) != batches.end()) return;
  if (std::ranges::adjacent_find(batches) == batches.end()) return;
  base::log_warning(
      "replicas of the model have trained on the same first batch, each of which is to have its own part of the data: "
      "give the DataLoader sampler=lamina.dist.get_sampler(dataset), or send the batch by lamina.broadcast() where "
      "this is on purpose");
}

void Passes::fail(const std::exception_ptr& error) {
  say({.pass = number_, .failure = describe(error)});
  end_pass();
}

void Passes::break_off(const std::exception_ptr& error) {
  const auto failure = describe(error);
  say({.pass = number_, .breaks_off = true, .failure = failure});
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
  const value::Tuple items{{word.pass, word.breaks_off, value::to_value(word.failure)}};
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
  if (items.size() != 3) throw base::FormatError("a replica's word of a pass without three parts");
  return {items[0].as<std::int64_t>(), items[1].as<bool>(), value::to_failure(items[2])};
}

Passes::Come Passes::come(const Coming& coming) const {
  const auto replica = static_cast<int>(std::ranges::find(replicas_, mailbox_.rank()) - replicas_.begin());
  const bool wait = newcomers().wait || newcomers().leaves;
  if (coming.comes == Comes::kHasNoData) {
    return {.collectives = coming.collectives, .without_data = {replica}, .newcomers = wait};
  }
  std::vector<std::int64_t> batches;
  if (coming.batch != kUnknownBatch) batches.push_back(coming.batch);
  return {.who = base::str("replica ", replica, " (rank ", mailbox_.rank(), ") "),
          .did = base::str(coming.comes == Comes::kUpdates ? "is about to update" : "has ended a backward", ", after ",
                           updates_, " optimizer steps and ", coming.left_out,
                           " calls of the model without a backward since the pass before"),
          .collectives = coming.collectives,
          .updates = coming.comes == Comes::kUpdates,
          .batches = std::move(batches),
          .newcomers = wait};
}

Passes::Come Passes::exchange(const Come& own) {
  const auto merge = [](const value::Value& low, const value::Value& high) {
    return to_value(merged(to_come(low), to_come(high)));
  };
  return to_come(exchange(kPasses, to_value(own), merge));
}

std::int64_t Passes::add_up(std::int64_t own) {
  require_whole();
  const auto merge = [](const value::Value& low, const value::Value& high) -> value::Value {
    const auto one = low.as<std::int64_t>(), other = high.as<std::int64_t>();
    return one < 0 || other < 0 ? std::int64_t{-1} : one + other;
  };
  return exchange(kSamples, own, merge).as<std::int64_t>();
}

// Another one may end the pass while this one waits.
value::Value Passes::exchange(const char* what, value::Value own, const messaging::Merge& merge) {
  auto patience = patience_;
  patience.check_interrupt = [this, interrupt = patience_.check_interrupt] {
    if (interrupt) interrupt();
    const auto* context = runtime::ExecutionContext::current();
    if (context != nullptr && context->cancelled()) throw base::CancelledError("the step has ended");
    listen();
    for (const auto rank : replicas_) require_unfailed(rank);
  };
  patience.check_interrupt();
  const auto named = [this](std::span<const base::Rank> missing) {
    return purpose() + base::without({missing.begin(), missing.end()});
  };
  return mailbox_.exchange(replicas_, what, std::move(own), merge, patience, {named, /*is_loose=*/true, number_ + 1});
}

value::Value Passes::to_value(const Come& come) {
  value::List without_data;
  for (const auto replica : come.without_data) without_data.items.emplace_back(std::int64_t{replica});
  return value::Tuple{{come.who, come.did, come.other, value::to_list(come.collectives), come.updates,
                       std::move(without_data), value::to_list(come.batches), come.newcomers}};
}

Passes::Come Passes::to_come(const value::Value& value) {
  const auto& items = value.as<value::Tuple>().items;
  if (items.size() != 8) throw base::FormatError("what replicas say of a pass without eight parts");
  const auto text = [&](std::size_t item) { return items[item].as<std::string>(); };
  Come come{text(0), text(1), text(2), value::to_numbers(items[3]), items[4].as<bool>(), {}};
  for (const auto& replica : items[5].as<value::List>().items) {
    come.without_data.push_back(static_cast<int>(replica.as<std::int64_t>()));
  }
  come.batches = value::to_numbers(items[6]);
  come.newcomers = items[7].as<bool>();
  return come;
}

Passes::Come Passes::merged(Come low, const Come& high) {
  if (low.other.empty()) {
    const bool differ = !low.did.empty() && !high.did.empty() && low.did != high.did;
    low.other = differ ? high.who + high.did : high.other;
  }
  if (low.did.empty()) {
    low.who = high.who;
    low.did = high.did;
  }
  low.collectives.resize(std::max(low.collectives.size(), high.collectives.size()));
  for (std::size_t i = 0; i < high.collectives.size(); ++i) {
    low.collectives[i] = std::max(low.collectives[i], high.collectives[i]);
  }
  low.batches.insert(low.batches.end(), high.batches.begin(), high.batches.end());
  low.updates = low.updates || high.updates;
  low.newcomers = low.newcomers || high.newcomers;
  low.without_data.insert(low.without_data.end(), high.without_data.begin(), high.without_data.end());
  return low;
}

void Passes::require_whole() {
  if (!broken_) listen();
  if (broken_)
    throw base::PeerError(base::str(purpose(), " was broken off before (", *broken_, "); start the job again"),
                          std::nullopt, base::Code{"replica-broken-off"});
}

void Passes::listen() {
  for (const auto rank : replicas_) {
    while (const auto word = mailbox_.poll(rank, channel_)) words_[rank].push_back(to_word(*word));
    require_unbroken(rank);
  }
}

// Throws where its step has failed before this pass.
void Passes::require_unfailed(base::Rank rank) {
  auto& words = words_[rank];
  while (!words.empty() && words.front().pass < number_) words.pop_front();
  if (!words.empty() && words.front().pass == number_) throw ended_by(rank, words.front());
}

void Passes::require_unbroken(base::Rank rank) {
  const auto& words = words_[rank];
  const auto broke = std::ranges::find(words, true, &Word::breaks_off);
  if (broke == words.end()) return;
  const auto word = *broke;
  words_[rank].clear();
  note_break(word.failure);
  throw ended_by(rank, word);
}

void Passes::note_break(const value::Failure& failure) {
  if (!broken_) broken_ = base::str(failure.type, " on rank ", failure.rank, ": ", failure.message);
}

value::RemoteFailure Passes::ended_by(base::Rank rank, const Word& word) const {
  auto failure = word.failure;
  const auto number = std::ranges::find(replicas_, rank) - replicas_.begin();
  failure.traceback += base::str(failure.traceback.empty() || failure.traceback.ends_with('\n') ? "" : "\n",
                                 "It ended pass ", word.pass, " of all replicas; replica ", number, " met it.");
  return value::RemoteFailure(std::move(failure));
}

}  // namespace lamina::data_parallel
