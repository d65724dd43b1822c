// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/witness_line.h"

#include <poll.h>

#include <chrono>
#include <thread>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/wait.h"
#include "lamina/contact/secret.h"
#include "lamina/environment/environment.h"
#include "lamina/environment/host_port.h"
#include "lamina/environment/rank_contract.h"
#include "lamina/membership/witness_words.h"

namespace lamina::session {
namespace {

using base::Clock;
using contact::Handshake;
using membership::EpochWord;

constexpr auto kCallsAgain = std::chrono::milliseconds(200);
constexpr auto kAsksWhetherThere = std::chrono::seconds(1);

std::vector<environment::Address> addresses_of(const std::string& text) {
  if (const auto place = environment::HostPort::read(text)) return place->addresses("--witness");
  throw base::ConfigError(base::str(environment::kWitnessVariable, " is \"", text,
                                    "\", no HOST:PORT: it is for `lamina run --witness` to set; unset it"));
}

}  // namespace

std::optional<std::string> WitnessLine::address() {
  return environment::process_environment()(environment::kWitnessVariable);
}

WitnessLine::WitnessLine(std::string job, Clock::duration silence, const base::Deadline& deadline,
                         const std::function<void()>& check_interrupt)
    : job_(std::move(job)), silence_(silence) {
  connect(deadline, check_interrupt);
}

void WitnessLine::connect(const base::Deadline& deadline, const std::function<void()>& check_interrupt) {
  const auto named = address().value_or("");
  const auto secret = contact::inherited_secret();
  if (!secret) {
    throw base::ConfigError("this process has no job secret from its launcher, by which the witness knows it",
                            base::Code{"start-secret-missing"});
  }
  const contact::Identity self{
      .rank = base::Rank(1), .size = 2, .secret = *secret, .generation = membership::kWitnessName, .told = {job_, ""}};
  while (!deadline.expired()) {
    for (const auto& address : addresses_of(named)) {
      Handshake handshake(self, address.begin_connect(), base::Rank(0), deadline);
      if (contact::finish(handshake, check_interrupt) == Handshake::State::kDone) {
        line_.emplace(handshake.take());
        return await_welcome(named, deadline, check_interrupt);
      }
      if (!handshake.has_closed() && !deadline.expired()) {
        throw base::ConfigError(base::str("the process at --witness ", named, " is not the witness of this job (",
                                          handshake.failure(), "): give it the same --secret-file as the launchers"),
                                base::Code{"elastic-witness"});
      }
    }
    if (check_interrupt) check_interrupt();
    std::this_thread::sleep_for(kCallsAgain);
  }
  give_up("nobody answers there");
}

// The witness says whether it is that of this job.
void WitnessLine::await_welcome(const std::string& named, const base::Deadline& deadline,
                                const std::function<void()>& check_interrupt) {
  try {
    while (!deadline.expired()) {
      if (const auto word = line_->hear()) {
        if (!membership::is_refusal(*word)) return;
        throw base::ConfigError(base::str("--witness ", named, ": ", membership::refusal_in(*word)),
                                base::Code{"elastic-witness"});
      }
      pollfd ready{line_->fd(), POLLIN, 0};
      ::poll(&ready, 1, static_cast<int>(base::kInterruptSlice.count()));
      if (check_interrupt) check_interrupt();
    }
    give_up("it does not answer");
  } catch (const base::PeerError& error) {
    give_up(error.what());
  }
}

void WitnessLine::give_up(const std::string& why) {
  line_.reset();
  if (lost_.empty()) lost_ = why;
}

void WitnessLine::say(const std::string& text) {
  if (!line_) return;
  said_ = Clock::now();
  if (!unanswered_) unanswered_ = said_;
  if (!line_->say(text)) give_up("it takes no words any more");
}

void WitnessLine::ask(std::int64_t session, const EpochWord& word) { say(membership::question(session, word)); }

std::vector<EpochWord> WitnessLine::hear() {
  std::vector<EpochWord> words;
  if (!line_) return words;
  try {
    while (const auto text = line_->hear()) {
      unanswered_.reset();
      if (*text == membership::kHere) continue;
      if (membership::is_refusal(*text)) throw base::PeerError(membership::refusal_in(*text));
      words.push_back(EpochWord::read(*text));
    }
  } catch (const base::Error& error) {
    give_up(error.what());
    return words;
  }
  const auto now = Clock::now();
  if (unanswered_ && now - *unanswered_ >= silence_) {
    give_up(base::str("no answer for ", std::chrono::duration_cast<std::chrono::seconds>(now - *unanswered_).count(),
                      " s"));
  } else if (now - said_ >= kAsksWhetherThere) {
    say(membership::kHere);
  }
  return words;
}

}  // namespace lamina::session
