// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/handshake.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "lamina/base/str.h"

namespace lamina::transport {
namespace {

constexpr std::string_view kGreeting = "LAMINA01";
constexpr std::size_t kNonce = sizeof(Secret);
constexpr std::size_t kHello = kGreeting.size() + 2 * sizeof(std::uint32_t) + kNonce;
constexpr std::size_t kAnswer = kNonce + sizeof(Mac);

std::string nonce() {
  const Secret random = random_secret();
  return std::string(random.begin(), random.end());
}

std::string bytes_of(std::int64_t rank) {
  const auto value = static_cast<std::uint32_t>(rank);
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

base::Rank rank_at(const std::string& bytes, std::size_t at) {
  std::uint32_t value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return base::Rank(value);
}

bool same_text(const std::string& got, const std::string& expected) {
  Mac a, b;
  if (got.size() != a.size() || expected.size() != b.size()) return false;
  std::memcpy(a.data(), got.data(), a.size());
  std::memcpy(b.data(), expected.data(), b.size());
  return same(a, b);
}

}  // namespace

const short Handshake::kRead = POLLIN;
const short Handshake::kWrite = POLLOUT;

Handshake::Handshake(const Identity& self, Fd socket, std::optional<base::Rank> peer, base::Deadline deadline)
    : self_(self), socket_(std::move(socket)), peer_(peer), connecting_(peer.has_value()), deadline_(deadline) {
  if (!connecting_) return;
  nonce_a_ = nonce();
  out_ = base::str(kGreeting, bytes_of(self_.rank.value), bytes_of(peer_->value), nonce_a_);
}

Handshake::State Handshake::fail(std::string why) {
  failure_ = std::move(why);
  return State::kFailed;
}

bool Handshake::flush() {
  while (!out_.empty()) {
    const ssize_t sent = ::send(socket_.get(), out_.data(), out_.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) {
      closed_ = errno != EAGAIN && errno != ENOTCONN;
      return false;
    }
    out_.erase(0, static_cast<std::size_t>(sent));
  }
  return true;
}

// Reads no byte beyond `n`: what follows the handshake is not ours.
bool Handshake::fill(std::size_t n) {
  while (in_.size() < n) {
    char chunk[128];
    const ssize_t got = ::recv(socket_.get(), chunk, std::min(sizeof chunk, n - in_.size()), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      closed_ = got == 0 || (errno != EAGAIN && errno != ENOTCONN);
      return false;
    }
    in_.append(chunk, static_cast<std::size_t>(got));
  }
  return true;
}

Handshake::State Handshake::advance() {
  while (flush()) {
    if (!connecting_ && step_ == 2) return State::kDone;
    const std::size_t wanted[2][2] = {{kHello, sizeof(Mac)}, {kAnswer, 1}};
    if (!fill(wanted[connecting_][step_])) break;
    if (const State state = receive(); state != State::kRunning) return state;
    in_.clear();
    ++step_;
  }
  if (closed_) return fail("the connection closed");
  return deadline_.expired() ? fail("no answer in time") : State::kRunning;
}

Handshake::State Handshake::receive() {
  if (step_ == 0) return connecting_ ? answered() : greeted();
  if (connecting_) return in_ == "K" ? State::kDone : fail("not a rank of this job");
  if (!same_text(in_, proof("connect"))) return fail(base::str("who says to be rank ", peer(), " lacks the secret"));
  out_ = "K";
  return State::kRunning;
}

Handshake::State Handshake::greeted() {
  if (in_.compare(0, kGreeting.size(), kGreeting) != 0) return fail("not a rank of this job");
  peer_ = rank_at(in_, kGreeting.size());
  const base::Rank to = rank_at(in_, kGreeting.size() + 4);
  if (to != self_.rank || *peer_ <= self_.rank || peer_->value >= self_.size) return fail("not a rank of this job");
  nonce_a_ = in_.substr(kGreeting.size() + 8);
  nonce_b_ = nonce();
  out_ = nonce_b_ + proof("accept");
  return State::kRunning;
}

Handshake::State Handshake::answered() {
  nonce_b_ = in_.substr(0, kNonce);
  if (!same_text(in_.substr(kNonce), proof("accept"))) return fail("it lacks this job's secret");
  out_ = proof("connect");
  return State::kRunning;
}

std::string Handshake::proof(const char* role) const {
  const base::Rank from = connecting_ ? self_.rank : *peer_;
  const base::Rank to = connecting_ ? *peer_ : self_.rank;
  const Mac mac =
      authenticate(self_.secret, base::str(role, "|", self_.generation, "|", from, "|", to, "|", nonce_a_, nonce_b_));
  return std::string(mac.begin(), mac.end());
}

}  // namespace lamina::transport
