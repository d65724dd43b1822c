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
#include "lamina/value/bytes.h"

namespace lamina::transport {
namespace {

// A note as it travels.
struct Written {
  std::uint64_t number;
  std::uint64_t value;
  std::uint64_t kind;
  rendezvous::Mac proof;

  static constexpr std::size_t kSigned = 3 * sizeof(std::uint64_t);
  rendezvous::Mac sign(rendezvous::Signer& signer) const {
    value::Writer text(2 * sizeof(Written));  // g++ 12 takes a short string's bytes for all there are
    text.put_block("note");
    text.put_block({reinterpret_cast<const char*>(this), kSigned});
    return signer.sign(text.take());
  }
};
static_assert(sizeof(Written) == Written::kSigned + sizeof(rendezvous::Mac));

// A machine that vanished closes nothing: the kernel asks after 3 s of silence, every 2 s, and gives up at about 10 s.
void watch_the_machine(int fd) {
  const auto set = [fd](int level, int name, int value) { ::setsockopt(fd, level, name, &value, sizeof value); };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 3);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 2);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 10000);
}

std::string why_closed(ssize_t received) {
  if (received == 0 || errno == ECONNRESET || errno == EPIPE) return "its process ended";
  return base::str("its connection broke (", base::system_error(), ")");
}

}  // namespace

Liveness::Liveness(std::vector<rendezvous::Connection>& connections)
    : peers_(connections.size()), events_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!events_) throw base::Error(base::str("cannot make an epoll descriptor: ", base::system_error()));
  for (std::size_t rank = 0; rank < connections.size(); ++rank) {
    if (!connections[rank].socket) continue;
    peers_[rank].socket = std::move(connections[rank].socket);
    peers_[rank].outgoing.emplace(connections[rank].outgoing);
    peers_[rank].incoming.emplace(connections[rank].incoming);
    const int fd = peers_[rank].socket.get();
    watch_the_machine(fd);
    base::close_in_forked_children(fd);
    epoll_event event{EPOLLIN | EPOLLRDHUP, {.u64 = rank}};
    if (::epoll_ctl(events_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
      throw base::Error(base::str("cannot watch rank ", rank, ": ", base::system_error()));
    }
  }
}

Liveness::~Liveness() {
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) forget(base::Rank(static_cast<std::int64_t>(rank)));
}

void Liveness::forget(base::Rank peer) {
  base::Fd& socket = peers_[peer.value].socket;
  if (!socket) return;
  base::keep_in_forked_children(socket.get());
  ::epoll_ctl(events_.get(), EPOLL_CTL_DEL, socket.get(), nullptr);
  ::shutdown(socket.get(), SHUT_RDWR);  // a child forked before this object was made may hold a copy
}

std::vector<Liveness::Note> Liveness::poll() {
  std::vector<Note> notes;
  epoll_event ready[16];
  const int count = ::epoll_wait(events_.get(), ready, 16, 0);
  for (int i = 0; i < count; ++i) {
    const base::Rank peer(static_cast<std::int64_t>(ready[i].data.u64));
    if (!read(peer, notes)) ::epoll_ctl(events_.get(), EPOLL_CTL_DEL, peers_[peer.value].socket.get(), nullptr);
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
      notes.push_back({peer, Kind::kGone, 0, why_closed(got)});
      return false;
    }
    from.unread.append(chunk, static_cast<std::size_t>(got));
    std::size_t at = 0;
    for (Written note; from.unread.size() - at >= sizeof note; at += sizeof note) {
      std::memcpy(&note, from.unread.data() + at, sizeof note);
      if (note.number != from.heard++ || !rendezvous::same(note.proof, note.sign(*from.incoming))) {
        notes.push_back({peer, Kind::kGone, 0, "somebody interfered with its connection"});
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
  // A handful of notes a life never fills the socket's buffer, so this neither blocks nor splits.
  [[maybe_unused]] auto sent = ::send(to.socket.get(), &note, sizeof note, MSG_NOSIGNAL);
}

}  // namespace lamina::transport
