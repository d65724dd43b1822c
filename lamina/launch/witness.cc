// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/witness.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <csignal>
#include <iostream>
#include <list>
#include <optional>
#include <string>
#include <utility>

#include "lamina/base/deadline.h"
#include "lamina/base/error.h"
#include "lamina/base/printable.h"
#include "lamina/base/str.h"
#include "lamina/contact/line.h"
#include "lamina/contact/reception.h"
#include "lamina/launch/ranks/secret.h"
#include "lamina/launch/ranks/watch.h"
#include "lamina/membership/witness.h"
#include "lamina/membership/witness_words.h"

namespace lamina::launch {
namespace {

constexpr std::chrono::seconds kNobody{10};  // without a rank of its job, which is over then
constexpr std::chrono::milliseconds kRound{500};
constexpr std::size_t kMostStrangers = 4096;

void tell(const std::string& line) { std::cerr << base::printable_line("lamina run: " + line) << std::endl; }

// The kernel ends a connection with a machine that does not answer for half a minute: ranks may say nothing for longer.
void notice_lost_machines(int socket) {
  constexpr int kOn = 1, kIdleSeconds = 10, kEachSeconds = 5, kTimes = 4;
  ::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &kOn, sizeof kOn);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &kIdleSeconds, sizeof kIdleSeconds);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &kEachSeconds, sizeof kEachSeconds);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &kTimes, sizeof kTimes);
}

// Ranks of one job that are connected, and the votes that they have from it. When none is left, it is as new.
class Desk {
 public:
  Desk(const environment::Address& address, contact::Secret secret)
      : reception_(address,
                   {.rank = base::Rank(0),
                    .size = 2,
                    .secret = secret,
                    .generation = membership::kWitnessName,
                    .told = {"", ""}},
                   kMostStrangers) {}

  void wait(const Signals& signals) {
    Watch watch;
    watch.add(signals.fd(), POLLIN, [] {});
    for (const auto& [fd, events] : reception_.awaited()) watch.add(fd, events, [] {});
    for (const auto& line : lines_) watch.add(line.fd(), POLLIN, [] {});
    watch.until(base::Deadline::after(kRound));
    watch.wait();
  }

  void attend() {
    for (auto& connection : reception_.take()) welcome(std::move(connection));
    for (auto at = lines_.begin(); at != lines_.end();) {
      const auto line = at++;
      if (!serve(*line)) lines_.erase(line);
    }
    if (lines_.empty() && !job_.empty()) {
      job_.clear();
      witness_ = {};
      alone_ = base::Deadline::after(kNobody);
    }
  }

  // There was a job, and nobody of it has come again for a while.
  bool is_over() const { return job_.empty() && alone_ && alone_->expired(); }

 private:
  void welcome(contact::Connection connection) {
    contact::Line line(std::move(connection));
    notice_lost_machines(line.fd());
    if (job_.empty()) {
      job_ = line.told();
      tell("the ranks of the job have found their witness");
    } else if (job_ != line.told()) {
      line.say(membership::refusal("it is the witness of another job, which runs: give this one another port"));
      return;
    }
    if (line.say(membership::kHere)) lines_.push_back(std::move(line));
  }

  // False where the line ends.
  bool serve(contact::Line& line) {
    try {
      while (const auto text = line.hear()) {
        if (*text == membership::kHere) {
          if (!line.say(membership::kHere)) return false;
          continue;
        }
        const auto [session, word] = membership::read_question(*text);
        const auto answer = witness_.answer(session, word);
        if (!answer) {
          line.say(membership::refusal("others have its vote on what follows the same epoch"));
          return false;
        }
        const bool votes = answer->kind == membership::EpochWord::Kind::kAccepts;
        if (votes && word.next) tell(base::str("its vote is for ", word.next->text()));
        if (!line.say(answer->to_text())) return false;
      }
      return true;
    } catch (const base::Error&) {  // the rank has ended, or says what no rank does
      return false;
    }
  }

  contact::Reception reception_;
  std::list<contact::Line> lines_;
  std::string job_;
  membership::Witness witness_;
  std::optional<base::Deadline> alone_;
};

environment::Address own_address(const environment::HostPort& place) {
  std::string why;
  for (const auto& address : place.addresses("--witness")) {
    try {
      address.listen();
      return address;
    } catch (const base::Error& error) {
      why = error.what();
    }
  }
  throw base::ConfigError(base::str("--witness ", place.text(), ": this machine cannot be the witness there (", why,
                                    "): give an address of this machine and a free port, or say what to run"),
                          base::Code{"run-port"});
}

}  // namespace

int run_witness(const Options& options) {
  options.validate();
  const Secret secret(*options.secret_file);
  Desk desk(own_address(*options.witness), secret.bytes());
  Signals signals({SIGINT, SIGTERM, SIGHUP});
  tell(base::str("the witness of a job at ", options.witness->text(), ": waits for its ranks"));
  while (true) {
    desk.wait(signals);
    if (const auto signal = signals.next()) return 128 + *signal;
    desk.attend();
    if (!desk.is_over()) continue;
    tell("no rank of the job is left, or it is over");
    return 0;
  }
}

}  // namespace lamina::launch
