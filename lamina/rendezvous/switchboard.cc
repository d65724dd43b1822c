// SPDX-License-Identifier: Apache-2.0
#include "lamina/rendezvous/switchboard.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>

#include "lamina/base/error.h"
#include "lamina/base/fork_guard.h"
#include "lamina/base/rank_list.h"
#include "lamina/base/str.h"

namespace lamina::rendezvous {
namespace {

using base::Clock;
constexpr auto kPatience = std::chrono::seconds(5);      // for one handshake; a silent stranger is closed then
constexpr auto kRetry = std::chrono::milliseconds(100);  // before connecting again to a rank that closed on us
constexpr std::size_t kMostStrangers = 256;              // open at once; the oldest gives way

void watch(const Fd& epoll, int how, int fd, std::uint32_t events) {
  epoll_event event{events, {.fd = fd}};
  if (::epoll_ctl(epoll.get(), how, fd, &event) == 0) return;
  throw base::Error(base::str("cannot watch for connections: ", system_error()));
}

}  // namespace

Switchboard::Switchboard(contact::Identity self, Fd listener, std::vector<std::string> addresses)
    : self_(std::move(self)),
      listener_(std::move(listener)),
      addresses_(std::move(addresses)),
      events_(::epoll_create1(EPOLL_CLOEXEC)) {
  base::close_in_forked_children(listener_.get());
  watch(events_, EPOLL_CTL_ADD, listener_.get(), EPOLLIN);
}

Switchboard::~Switchboard() {
  stop_listening();
  while (!running_.empty()) remove(running_.begin());
}

void Switchboard::stop_listening() {
  if (!listener_) return;
  base::keep_in_forked_children(listener_.get());
  listener_.reset();
}

void Switchboard::call(base::Rank peer) {
  if (!made_.contains(peer)) calls_.try_emplace(peer, Clock::now());
}

void Switchboard::hang_up(base::Rank peer) { calls_.erase(peer); }

std::vector<Switchboard::Event> Switchboard::advance() {
  std::vector<Event> events;
  call_again();
  if (listener_) accept_all();
  for (auto at = running_.begin(); at != running_.end();) {
    const auto each = at++;
    const auto state = each->advance();
    if (state == contact::Handshake::State::kRunning) {
      watch(events_, EPOLL_CTL_MOD, each->fd(), each->events() == POLLIN ? EPOLLIN : EPOLLOUT);
    } else if (state == contact::Handshake::State::kDone) {
      // A rank whose first connection broke half-way connects again; the last proven one counts.
      const base::Rank peer = each->peer();
      calls_.erase(peer);
      made_.insert(peer);
      base::keep_in_forked_children(each->fd());
      ::epoll_ctl(events_.get(), EPOLL_CTL_DEL, each->fd(), nullptr);
      events.push_back({peer, each->take()});
      running_.erase(each);
    } else {
      if (state == contact::Handshake::State::kKnocked) {
        knocked_by(each->peer());
      } else {
        failed(*each, events);
      }
      remove(each);
    }
  }
  return events;
}

void Switchboard::failed(const contact::Handshake& handshake, std::vector<Event>& events) {
  const bool is_knock = handshake.connecting() && self_.rank < handshake.peer();
  const bool is_heard = is_knock && handshake.has_closed() && !handshake.was_refused();
  const bool says_more = last_failure_.empty() || !handshake.has_closed();  // than that a connection closed
  if (!is_heard && says_more) last_failure_ = handshake.failure();
  if (!handshake.connecting()) return;
  const auto call = calls_.find(handshake.peer());
  if (call == calls_.end()) return;
  call->second = Clock::now() + kRetry;
  if (!is_heard) events.push_back({handshake.peer(), std::nullopt, handshake.was_refused()});
}

// Once: who still wants a connection then knocks again.
void Switchboard::knocked_by(base::Rank peer) {
  if (!made_.contains(peer) && !is_calling(peer)) add(Address::parse(addresses_[peer.value]).begin_connect(), peer);
}

bool Switchboard::is_calling(base::Rank peer) const {
  return std::ranges::any_of(running_, [&](const auto& one) { return one.connecting() && one.peer() == peer; });
}

void Switchboard::call_again() {
  for (auto& [peer, at] : calls_) {
    if (Clock::now() < at || is_calling(peer)) continue;
    at = Clock::now() + kRetry;
    add(Address::parse(addresses_[peer.value]).begin_connect(), peer);
  }
}

void Switchboard::add(Fd socket, std::optional<base::Rank> peer) {
  watch(events_, EPOLL_CTL_ADD, socket.get(), peer ? EPOLLOUT : EPOLLIN);
  base::close_in_forked_children(socket.get());
  running_.emplace_back(self_, std::move(socket), peer, base::Deadline::after(kPatience));
}

void Switchboard::remove(std::list<contact::Handshake>::iterator handshake) {
  base::keep_in_forked_children(handshake->fd());
  running_.erase(handshake);
}

void Switchboard::accept_all() {
  while (true) {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) return;
    if (running_.size() >= kMostStrangers) {
      const auto oldest = std::find_if(running_.begin(), running_.end(), [](auto& one) { return !one.connecting(); });
      if (oldest != running_.end()) remove(oldest);
    }
    add(std::move(socket), std::nullopt);
  }
}

Joined connect_peers(std::unique_ptr<Switchboard> board, const std::vector<base::Rank>& peers, base::Deadline deadline,
                     const std::function<void()>& check_interrupt) {
  Joined joined{std::vector<contact::Connection>(static_cast<std::size_t>(board->size())), std::move(board)};
  for (const base::Rank peer : peers) {
    if (peer < joined.others->rank()) joined.others->call(peer);
  }
  const auto missing = [&] {
    std::vector<base::Rank> ranks = peers;
    std::erase_if(ranks, [&](base::Rank peer) { return !!joined.connections[peer.value].socket; });
    return ranks;
  };
  for (auto next_check = Clock::now(); !missing().empty();) {
    if (deadline.expired()) {
      throw base::TimeoutError(no_connection(missing(), joined.others->last_failure()),
                               base::Code{"start-no-connection"});
    }
    if (Clock::now() >= next_check) {
      if (check_interrupt) check_interrupt();
      next_check = Clock::now() + kJoinSlice;
    }
    pollfd polled{joined.others->fd(), POLLIN, 0};
    ::poll(&polled, 1, static_cast<int>(kRetry.count()));
    for (auto& event : joined.others->advance()) {
      if (event.made) joined.connections[event.peer.value] = std::move(*event.made);
    }
  }
  return joined;
}

std::string no_connection(const std::vector<base::Rank>& ranks, const std::string& last_failure) {
  return base::str("no connection with ", base::name_ranks(ranks), " in time",
                   last_failure.empty() ? "" : base::str("; last refused: ", last_failure));
}

}  // namespace lamina::rendezvous
