// SPDX-License-Identifier: Apache-2.0
#include "lamina/contact/reception.h"

#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <optional>

#include "lamina/base/deadline.h"
#include "lamina/base/fork_guard.h"

namespace lamina::contact {
namespace {

constexpr auto kPatience = std::chrono::seconds(5);  // with one stranger

}  // namespace

Reception::Reception(const environment::Address& address, Identity self, std::size_t most)
    : self_(std::move(self)), most_(most), listener_(address.listen()) {
  base::close_in_forked_children(listener_.get());
}

Reception::~Reception() {
  for (auto& stranger : strangers_) base::keep_in_forked_children(stranger.fd());
  base::keep_in_forked_children(listener_.get());
}

std::vector<std::pair<int, short>> Reception::awaited() const {
  std::vector<std::pair<int, short>> all{{listener_.get(), POLLIN}};
  for (const auto& stranger : strangers_) all.emplace_back(stranger.fd(), stranger.events());
  return all;
}

std::vector<Connection> Reception::take() {
  accept_all();
  std::vector<Connection> proven;
  for (auto at = strangers_.begin(); at != strangers_.end();) {
    const auto stranger = at++;
    const auto state = stranger->advance();
    if (state == Handshake::State::kRunning) continue;
    base::keep_in_forked_children(stranger->fd());
    if (state == Handshake::State::kDone) proven.push_back(stranger->take());
    strangers_.erase(stranger);
  }
  return proven;
}

void Reception::accept_all() {
  while (base::Fd socket{::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)}) {
    if (strangers_.size() >= most_) {
      base::keep_in_forked_children(strangers_.front().fd());
      strangers_.pop_front();
    }
    base::close_in_forked_children(socket.get());
    strangers_.emplace_back(self_, std::move(socket), std::nullopt, base::Deadline::after(kPatience));
  }
}

}  // namespace lamina::contact
