// SPDX-License-Identifier: Apache-2.0
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <list>
#include <map>

#include "lamina/base/deadline.h"
#include "lamina/base/error.h"
#include "lamina/base/rank_list.h"
#include "lamina/base/str.h"
#include "lamina/rendezvous/handshake.h"

namespace lamina::rendezvous {
namespace {

using base::Clock;
constexpr auto kPatience = std::chrono::seconds(5);      // for one handshake; a silent stranger is closed then
constexpr auto kRetry = std::chrono::milliseconds(100);  // before connecting again to a rank that closed on us
constexpr std::size_t kMostStrangers = 256;              // open at once; the oldest gives way

class Mesh {
 public:
  Mesh(const Identity& self, Fd listener, const std::vector<std::string>& addresses, base::Deadline deadline)
      : self_(self), listener_(std::move(listener)), addresses_(addresses), deadline_(deadline), done_(self.size) {
    for (int lower = 0; lower < self.rank.value; ++lower) retry_at_[base::Rank(lower)] = Clock::now();
  }

  std::vector<Connection> connect(const std::function<void()>& check_interrupt) {
    for (auto next_check = Clock::now(); missing() > 0;) {
      if (deadline_.expired()) throw base::TimeoutError(explain(), base::Code{"start-no-connection"});
      if (Clock::now() >= next_check) {
        if (check_interrupt) check_interrupt();
        next_check = Clock::now() + kJoinSlice;
      }
      connect_again();
      wait();
      accept_all();
      advance_all();
    }
    return std::move(done_);
  }

 private:
  int missing() const {
    return self_.size - 1 -
           static_cast<int>(std::count_if(done_.begin(), done_.end(), [](auto& one) { return !!one.socket; }));
  }

  void connect_again() {
    std::erase_if(retry_at_, [&](const auto& waiting) {
      if (Clock::now() < waiting.second) return false;
      Fd socket = Address::parse(addresses_[waiting.first.value]).begin_connect();
      running_.emplace_back(self_, std::move(socket), waiting.first, base::Deadline::after(kPatience));
      return true;
    });
  }

  void wait() {
    std::vector<pollfd> polled{{listener_.get(), POLLIN, 0}};
    for (const auto& handshake : running_) polled.push_back({handshake.fd(), handshake.events(), 0});
    ::poll(polled.data(), polled.size(), static_cast<int>((retry_at_.empty() ? kJoinSlice : kRetry).count()));
  }

  void accept_all() {
    while (true) {
      Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) return;
      if (running_.size() >= kMostStrangers) {
        const auto oldest = std::find_if(running_.begin(), running_.end(), [](auto& one) { return !one.connecting(); });
        if (oldest != running_.end()) running_.erase(oldest);
      }
      running_.emplace_back(self_, std::move(socket), std::nullopt, base::Deadline::after(kPatience));
    }
  }

  void advance_all() {
    for (auto at = running_.begin(); at != running_.end();) {
      const auto state = at->advance();
      if (state == Handshake::State::kRunning) {
        ++at;
        continue;
      }
      // A rank whose first connection broke half-way connects again; the last proven one counts.
      if (state == Handshake::State::kDone) done_[at->peer().value] = at->take();
      if (state == Handshake::State::kFailed) failed(*at);
      at = running_.erase(at);
    }
  }

  void failed(const Handshake& handshake) {
    last_failure_ = handshake.failure();
    if (handshake.connecting()) retry_at_[handshake.peer()] = Clock::now() + kRetry;
  }

  std::string explain() const {
    std::vector<base::Rank> ranks;
    for (int rank = 0; rank < self_.size; ++rank) {
      if (rank != self_.rank.value && !done_[rank].socket) ranks.emplace_back(rank);
    }
    return base::str("no connection with ", base::name_ranks(ranks), " in time",
                     last_failure_.empty() ? "" : base::str("; last refused: ", last_failure_));
  }

  const Identity& self_;
  const Fd listener_;
  const std::vector<std::string>& addresses_;
  const base::Deadline deadline_;
  std::vector<Connection> done_;
  std::list<Handshake> running_;
  std::map<base::Rank, Clock::time_point> retry_at_;
  std::string last_failure_;
};

}  // namespace

std::vector<Connection> connect_mesh(const Identity& self, Fd listener, const std::vector<std::string>& addresses,
                                     base::Deadline deadline, const std::function<void()>& check_interrupt) {
  return Mesh(self, std::move(listener), addresses, deadline).connect(check_interrupt);
}

}  // namespace lamina::rendezvous
