// SPDX-License-Identifier: Apache-2.0
#include "lamina/rendezvous/roll_call.h"

#include <algorithm>

#include "lamina/base/error.h"
#include "lamina/base/hex.h"
#include "lamina/base/log.h"
#include "lamina/base/rank_list.h"
#include "lamina/base/str.h"
#include "lamina/base/wait.h"
#include "lamina/contact/secret.h"

namespace lamina::rendezvous {
namespace {

// How long rank 0 holds the store for the others to leave it, and how much longer than their own timeout they wait for
// its verdict once it is there: it may have started later.
constexpr auto kFarewell = std::chrono::seconds(10);
// The verdict when nobody is missing, before the number of ranks.
const std::string kAllCame = "all of ";
constexpr const char* kCall = "call";
constexpr const char* kVerdict = "verdict";

std::string random_hex() { return base::to_hex(contact::random_secret()); }

}  // namespace

RollCall::RollCall(JobStore& store, Options options)
    : store_(store),
      options_(std::move(options)),
      verdict_by_(base::Deadline::after(options_.deadline.at() - base::Clock::now() + kFarewell)) {}

const std::string& RollCall::meet() {
  const std::string self = random_hex();
  const std::string process = base::str(options_.name, "process/", options_.rank), call = options_.name + kCall;
  if (store_.claim(process, self) != self) {
    throw base::ConfigError(base::str("two processes call themselves rank ", options_.rank, ": check RANK"),
                            base::Code{"start-rank-twice"});
  }
  if (options_.rank == base::Rank(0)) {
    store_.set(call, random_hex());
  } else if (!store_.wait({call}, options_.deadline).empty()) {
    throw base::TimeoutError(base::str("rank 0 did not join within ", seconds()), base::Code{"start-rank-missing"});
  }
  return call_ = base::str(options_.name, store_.get(call), "/");
}

std::vector<std::string> RollCall::call(const std::string& said) {
  const std::string own_size = std::to_string(options_.size);
  store_.set(key("hello", options_.rank), base::str(own_size, " ", said));
  const std::string verdict = options_.rank == base::Rank(0) ? judge() : await_verdict();
  if (!verdict.starts_with(kAllCame)) {
    leave();
    throw base::TimeoutError(verdict, base::Code{"start-rank-missing"});
  }
  if (const std::string size = verdict.substr(kAllCame.size()); size != own_size) {
    differ(options_.rank, size, own_size);
  }
  std::vector<std::string> all;
  for (int rank = 0; rank < options_.size; ++rank) {
    const std::string heard = store_.get(key("hello", base::Rank(rank)));
    const auto space = heard.find(' ');
    if (const std::string size = heard.substr(0, space); size != own_size) differ(base::Rank(rank), own_size, size);
    all.push_back(heard.substr(space + 1));
  }
  return all;
}

void RollCall::differ(base::Rank rank, const std::string& size, const std::string& its_size) {
  leave();
  throw base::ConfigError(
      base::str("ranks 0 and ", rank, " differ in their WORLD_SIZE: ", size, " and ", its_size, ": start them alike"),
      base::Code{"start-ranks-differ"});
}

std::vector<base::Rank> RollCall::missing_by(base::Deadline deadline) {
  const auto missing = store_.wait(keys("hello"), deadline);
  std::vector<base::Rank> ranks;
  for (int rank = 0; rank < options_.size; ++rank) {
    const base::Rank each(rank);
    if (std::ranges::find(missing, key("hello", each)) != missing.end()) ranks.push_back(each);
  }
  return ranks;
}

std::string RollCall::judge() {
  if (const auto soon = base::Deadline::after(base::kSlow); soon.at() < options_.deadline.at()) {
    if (const auto late = missing_by(soon); !late.empty()) {
      base::log_warning(base::str(base::name_ranks(late), " did not join for 10 s, still waiting: was it started?"));
    }
  }
  absent_ = missing_by(options_.deadline);
  const std::string verdict =
      absent_.empty() ? base::str(kAllCame, options_.size)
                      : base::str(base::name_ranks(absent_), " did not join within ", seconds(),
                                  ": was it started, and with the same MASTER_ADDR, MASTER_PORT and LAMINA_EPOCH?");
  store_.set(call_ + kVerdict, verdict);
  return verdict;
}

// Rank 0 is there, or meet() had thrown.
std::string RollCall::await_verdict() {
  const std::string key = call_ + kVerdict;
  return store_.wait({key}, verdict_by_).empty() ? store_.get(key)
                                                 : base::str("rank 0 did not join within ", seconds());
}

void RollCall::leave() {
  // Not "": c10d's store announces each value's size as the begin of something longer, so the kernel holds an empty one
  // back for 200 ms.
  store_.set(key("left", options_.rank), "left");
  if (options_.rank != base::Rank(0)) return;
  auto awaited = keys("left");
  for (auto rank : absent_) std::erase(awaited, key("left", rank));
  store_.wait(awaited, base::Deadline::after(kFarewell));
  store_.remove(options_.name + kCall);
  store_.remove(call_ + kVerdict);
  for (const char* what : {"hello", "left"}) {
    for (const auto& key : keys(what)) store_.remove(key);
  }
}

std::string RollCall::key(const char* what, base::Rank rank) const { return base::str(call_, what, "/", rank); }

std::vector<std::string> RollCall::keys(const char* what) const {
  std::vector<std::string> keys;
  for (int rank = 0; rank < options_.size; ++rank) keys.push_back(key(what, base::Rank(rank)));
  return keys;
}

std::string RollCall::seconds() const {
  return base::str(static_cast<double>(options_.timeout.count()) / 1000.0, " s");
}

}  // namespace lamina::rendezvous
