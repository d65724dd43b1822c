// SPDX-License-Identifier: Apache-2.0
#include "lamina/contact/handshake.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "lamina/base/str.h"
#include "lamina/base/wait.h"

namespace lamina::contact {
namespace {

constexpr std::string_view kGreeting = "LAMINA02";
constexpr std::size_t kNonce = sizeof(Secret);
constexpr std::size_t kHello = kGreeting.size() + 2 * sizeof(std::uint32_t) + kNonce;
constexpr std::size_t kAnswer = kNonce + sizeof(Mac);
constexpr std::size_t kSealSize = sizeof(std::uint32_t) + sizeof(Mac);
constexpr std::uint32_t kMostTold = 1 << 16;

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

bool same_text(std::string_view got, std::string_view expected) {
  Mac a, b;
  if (got.size() != a.size() || expected.size() != b.size()) return false;
  std::memcpy(a.data(), got.data(), a.size());
  std::memcpy(b.data(), expected.data(), b.size());
  return same(a, b);
}

std::string text(const Mac& mac) { return std::string(mac.begin(), mac.end()); }

}  // namespace

const short Handshake::kRead = POLLIN;
const short Handshake::kWrite = POLLOUT;

Handshake::Handshake(const Identity& self, base::Fd socket, std::optional<base::Rank> peer, base::Deadline deadline)
    : self_(self), socket_(std::move(socket)), peer_(peer), connecting_(peer.has_value()), deadline_(deadline) {
  awaited_ = connecting_ ? Awaited::kAnswer : Awaited::kGreeting;
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
      refused_ = errno == ECONNREFUSED;
      return false;
    }
    out_.erase(0, static_cast<std::size_t>(sent));
  }
  return true;
}

// Reads no byte beyond `n`: what follows the handshake is not ours.
bool Handshake::fill(std::size_t n) {
  while (in_.size() < n) {
    char chunk[512];
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
    if (awaited_ == Awaited::kNothing) return State::kDone;
    if (!fill(wanted())) break;
    if (const State state = receive(); state != State::kRunning) return state;
    in_.clear();
  }
  if (closed_) return fail("the connection closed");
  return deadline_.expired() ? fail("no answer in time") : State::kRunning;
}

std::size_t Handshake::wanted() const {
  switch (awaited_) {
    case Awaited::kGreeting:
      return kHello;
    case Awaited::kAnswer:
      return kAnswer;
    case Awaited::kProof:
      return sizeof(Mac);
    case Awaited::kSealSize:
      return kSealSize;
    case Awaited::kSealed:
      return sealed_size_;
    case Awaited::kNothing:
      break;
  }
  return 0;
}

Handshake::State Handshake::receive() {
  switch (awaited_) {
    case Awaited::kGreeting:
      return greeted();
    case Awaited::kAnswer:
      return answered();
    case Awaited::kProof:
      return proven();
    case Awaited::kSealSize:
      std::memcpy(&sealed_size_, in_.data(), sizeof sealed_size_);
      if (sealed_size_ > kMostTold) return fail("not a rank of this job");
      seal_ = in_.substr(sizeof sealed_size_);
      awaited_ = Awaited::kSealed;
      return State::kRunning;
    case Awaited::kSealed:
      return opened();
    case Awaited::kNothing:
      break;
  }
  return State::kRunning;
}

Handshake::State Handshake::greeted() {
  if (in_.compare(0, kGreeting.size(), kGreeting) != 0) return fail("not a rank of this job");
  peer_ = rank_at(in_, kGreeting.size());
  const base::Rank to = rank_at(in_, kGreeting.size() + 4);
  if (to != self_.rank || *peer_ == self_.rank || peer_->value >= self_.size) return fail("not a rank of this job");
  if (*peer_ < self_.rank) return State::kKnocked;
  nonce_a_ = in_.substr(kGreeting.size() + 8);
  nonce_b_ = nonce();
  out_ = nonce_b_ + prove("accept");
  awaited_ = Awaited::kProof;
  return State::kRunning;
}

Handshake::State Handshake::answered() {
  nonce_b_ = in_.substr(0, kNonce);
  if (!same_text(in_.substr(kNonce), prove("accept"))) return fail("it lacks this job's secret");
  out_ = prove("connect") + seal();
  awaited_ = Awaited::kSealSize;
  return State::kRunning;
}

Handshake::State Handshake::proven() {
  if (!same_text(in_, prove("connect"))) return fail(base::str("who says to be rank ", peer(), " lacks the secret"));
  awaited_ = Awaited::kSealSize;
  return State::kRunning;
}

Handshake::State Handshake::opened() {
  if (!same_text(seal_, text(authenticate(key(peer()), "told", {in_})))) return fail("what it tells was changed");
  told_ = in_;
  if (!connecting_) out_ = seal();
  awaited_ = Awaited::kNothing;
  return State::kRunning;
}

std::string Handshake::prove(const char* purpose) const {
  const std::string from = bytes_of(this->from().value), to = bytes_of(this->to().value);
  return text(authenticate(self_.secret, purpose, {self_.generation, from, to, nonce_a_, nonce_b_}));
}

// HKDF's second half (RFC 5869): the secret is random, so its first half has nothing to do.
Secret Handshake::key(base::Rank sender) const {
  const std::string from = bytes_of(this->from().value), to = bytes_of(this->to().value);
  const std::string direction = bytes_of(sender.value);
  return authenticate(self_.secret, "key", {self_.generation, from, to, nonce_a_, nonce_b_, direction});
}

std::string Handshake::seal() const {
  const std::string& told = self_.told.at(peer_->value);
  return base::str(bytes_of(static_cast<std::int64_t>(told.size())),
                   text(authenticate(key(self_.rank), "told", {told})), told);
}

Connection Handshake::take() {
  return {std::move(socket_), key(self_.rank), key(peer()), std::move(told_), !connecting_};
}

Handshake::State finish(Handshake& handshake, const std::function<void()>& check_interrupt) {
  auto state = handshake.advance();
  while (state == Handshake::State::kRunning) {
    pollfd ready{handshake.fd(), handshake.events(), 0};
    ::poll(&ready, 1, static_cast<int>(base::kInterruptSlice.count()));
    if (check_interrupt) check_interrupt();
    state = handshake.advance();
  }
  return state;
}

}  // namespace lamina::contact
