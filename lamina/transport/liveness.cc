// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/liveness.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "lamina/base/error.h"
#include "lamina/base/fork_guard.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"
#include "lamina/value/bytes.h"

namespace lamina::transport {
namespace {

// A note as it travels.
struct Written {
  std::uint64_t number;
  std::uint64_t value;
  std::uint64_t kind;
  contact::Mac proof;

  static constexpr std::size_t kSigned = 3 * sizeof(std::uint64_t);
  contact::Mac sign(contact::Signer& signer) const {
    value::Writer text(2 * sizeof(Written));  // g++ 12 takes a short string's bytes for all there are
    text.put_block("note");
    text.put_block({reinterpret_cast<const char*>(this), kSigned});
    return signer.sign(text.take());
  }
};
static_assert(sizeof(Written) == Written::kSigned + sizeof(contact::Mac));

// A machine that vanished closes nothing: the kernel asks after 3 s of silence, every 2 s, and gives up at about 10 s.
void watch_the_machine(int fd) {
  const auto set = [fd](int level, int name, int value) { ::setsockopt(fd, level, name, &value, sizeof value); };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 3);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 2);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 10000);
}

Liveness::Note end_of(base::Rank peer, ssize_t received) {
  const auto gone = Liveness::Kind::kGone;
  if (received == 0 || errno == ECONNRESET || errno == EPIPE) {
    return {peer, gone, 0, why(News::Fate::kEnded), News::Fate::kEnded};
  }
  return {peer, gone, 0, base::str("its connection broke (", base::system_error(), ")"), News::Fate::kBroken};
}

}  // namespace

Liveness::Liveness(int size) : peers_(static_cast<std::size_t>(size)), events_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!events_) throw base::Error(base::str("cannot make an epoll descriptor: ", base::system_error()));
}

Liveness::~Liveness() {
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) forget(base::Rank(static_cast<std::int64_t>(rank)));
}

void Liveness::add(base::Rank peer, contact::Connection& connection) {
  forget(peer);
  std::lock_guard guard(sending_);
  peers_[peer.value] = {std::move(connection.socket), contact::Signer(connection.outgoing),
                        contact::Signer(connection.incoming)};
  const int fd = peers_[peer.value].socket.get();
  watch_the_machine(fd);
  base::close_in_forked_children(fd);
  epoll_event event{EPOLLIN | EPOLLRDHUP, {.u64 = static_cast<std::uint64_t>(peer.value)}};
  if (::epoll_ctl(events_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    throw base::Error(base::str("cannot watch rank ", peer, ": ", base::system_error()));
  }
}

void Liveness::forget(base::Rank peer) {
  std::lock_guard guard(sending_);
  base::Fd& socket = peers_[peer.value].socket;
  if (!socket) return;
  base::keep_in_forked_children(socket.get());
  ::epoll_ctl(events_.get(), EPOLL_CTL_DEL, socket.get(), nullptr);
  ::shutdown(socket.get(), SHUT_RDWR);  // a child forked before this object was made may hold a copy
  socket.reset();
}

std::uint64_t Liveness::pack(const News::Word& word) {
  return static_cast<std::uint64_t>(word.about.value) << 8 | static_cast<std::uint64_t>(word.fate);
}

std::optional<News::Word> Liveness::unpack(std::uint64_t value, int size) {
  const News::Word word{base::Rank(static_cast<std::int64_t>(value >> 8)), static_cast<News::Fate>(value & 255)};
  if (word.about.value >= size || word.fate == News::Fate::kPresent || word.fate > News::Fate::kSilent) {
    return std::nullopt;
  }
  return word;
}

std::vector<Liveness::Note> Liveness::poll() {
  std::vector<Note> notes;
  epoll_event ready[16];
  const int count = ::epoll_wait(events_.get(), ready, 16, 0);
  for (int i = 0; i < count; ++i) {
    const base::Rank peer(static_cast<std::int64_t>(ready[i].data.u64));
    if ((ready[i].events & EPOLLOUT) != 0) flush(peer);
    if (!read(peer, notes)) forget(peer);
  }
  return notes;
}

bool Liveness::read(base::Rank peer, std::vector<Note>& notes) {
  Peer& from = peers_[peer.value];
  while (true) {
    char chunk[16 * sizeof(Written)];
    const ssize_t got = ::recv(from.socket.get(), chunk, sizeof chunk, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return true;
    if (got <= 0) {
      notes.push_back(end_of(peer, got));
      return false;
    }
    from.unread.append(chunk, static_cast<std::size_t>(got));
    std::size_t at = 0;
    for (Written note; from.unread.size() - at >= sizeof note; at += sizeof note) {
      std::memcpy(&note, from.unread.data() + at, sizeof note);
      if (note.number != from.heard++ || !contact::same(note.proof, note.sign(*from.incoming))) {
        notes.push_back({peer, Kind::kGone, 0, why(News::Fate::kForeign), News::Fate::kForeign});
        return false;
      }
      notes.push_back({peer, static_cast<Kind>(note.kind), note.value, {}});
    }
    from.unread.erase(0, at);
  }
}

void Liveness::note(base::Rank peer, Kind kind, std::uint64_t value) {
  std::lock_guard guard(sending_);
  Peer& to = peers_[peer.value];
  if (!to.socket) return;
  Written note{to.sent++, value, static_cast<std::uint64_t>(kind), {}};
  note.proof = note.sign(*to.outgoing);
  to.unsent.append(reinterpret_cast<const char*>(&note), sizeof note);
  if (to.unsent.size() == sizeof note) send_unsent(peer);  // else it waits for room already
}

void Liveness::flush(base::Rank peer) {
  std::lock_guard guard(sending_);
  if (peers_[peer.value].socket) send_unsent(peer);
}

void Liveness::send_unsent(base::Rank peer) {
  Peer& to = peers_[peer.value];
  const ssize_t sent = ::send(to.socket.get(), to.unsent.data(), to.unsent.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0 && errno != EAGAIN && errno != EINTR) to.unsent.clear();
  if (sent > 0) to.unsent.erase(0, static_cast<std::size_t>(sent));
  const std::uint32_t room = to.unsent.empty() ? 0 : std::uint32_t{EPOLLOUT};
  epoll_event event{EPOLLIN | EPOLLRDHUP | room, {.u64 = static_cast<std::uint64_t>(peer.value)}};
  ::epoll_ctl(events_.get(), EPOLL_CTL_MOD, to.socket.get(), &event);
}

}  // namespace lamina::transport
