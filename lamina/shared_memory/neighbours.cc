// SPDX-License-Identifier: Apache-2.0
// How they meet, each step on all members, over the board:
//
//   cards (host, address, token) -> all on one host? -> connect to the lower ones, accept the higher ones -> votes
//
// Whoever connects says the token of the member that it means, and is answered with its own: only who reads the board
// knows them. The kernel says which user it is. The sockets' addresses are the kernel's own choice and end with them.
#include "lamina/shared_memory/neighbours.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <fstream>

#include "lamina/base/error.h"
#include "lamina/base/fork_guard.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"

namespace lamina::shared_memory {
namespace {

using base::str;

using Clock = base::Deadline::Clock;

constexpr std::size_t kTokenBytes = 16;
constexpr Clock::duration kGreeting = std::chrono::seconds(1);  // for a stranger who connects and says nothing

struct Hello {
  std::array<char, 2 * kTokenBytes> token{};  // of the one that is meant
  int from = -1;
};

std::string random_token() {
  std::array<unsigned char, kTokenBytes> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw base::Error(str("no random bytes: ", base::system_error()));
  }
  std::string token;
  for (const unsigned char byte : bytes) {
    for (const int digit : {byte >> 4, byte & 15}) token += "0123456789abcdef"[digit];
  }
  return token;
}

std::string name_space(const char* kind) {
  std::array<char, 64> name{};
  const auto length = ::readlink(str("/proc/self/ns/", kind).c_str(), name.data(), name.size());
  return {name.data(), length < 0 ? 0 : static_cast<std::size_t>(length)};
}

// Processes of which this is the same can reach each other's sockets; that they share memory is tried.
std::string host() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  return str(boot, " ", name_space("ipc"), " ", name_space("net"));
}

base::Fd checked(int fd, const char* doing) {
  if (fd < 0) throw base::Error(str("cannot ", doing, ": ", base::system_error()));
  return base::Fd(fd);
}

base::Fd listen(int backlog) {
  auto socket = checked(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), "make a socket");
  const sa_family_t any = AF_UNIX;  // without a name: the kernel chooses one
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&any), sizeof any) != 0 ||
      ::listen(socket.get(), backlog) != 0) {
    throw base::Error(str("cannot listen on a local socket: ", base::system_error()));
  }
  return socket;
}

std::string address_of(const base::Fd& listening) {
  sockaddr_un address{};
  socklen_t length = sizeof address;
  ::getsockname(listening.get(), reinterpret_cast<sockaddr*>(&address), &length);
  return {address.sun_path + 1, length - offsetof(sockaddr_un, sun_path) - 1};
}

base::Fd connect_to(const std::string& name) {
  auto socket = checked(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), "make a socket");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof address.sun_path) throw base::Error("a local socket's name is too long");
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    throw base::Error(str("cannot connect to a local socket: ", base::system_error()));
  }
  return socket;
}

bool of_this_user(const base::Fd& socket) {
  ucred other{};
  socklen_t length = sizeof other;
  return ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &other, &length) == 0 && other.uid == ::geteuid();
}

// Waits until something can be read. False when the deadline comes first.
bool readable(const base::Fd& socket, base::Deadline deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.at() - base::Deadline::Clock::now());
    if (left.count() <= 0) return false;
    pollfd one{socket.get(), POLLIN, 0};
    const int count = ::poll(&one, 1, static_cast<int>(std::min<std::int64_t>(left.count(), 1000)));
    if (count > 0) return true;
  }
}

Hello hello(const std::string& token, int from) {
  Hello hello;
  hello.from = from;
  std::memcpy(hello.token.data(), token.data(), std::min(token.size(), hello.token.size()));
  return hello;
}

void say(const base::Fd& socket, const Hello& hello) {
  if (::send(socket.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) {
    throw base::Error(str("cannot greet a neighbour: ", base::system_error()));
  }
}

// The rank that greets with this token; -1 for anything else.
int hear(const base::Fd& socket, const std::string& token, base::Deadline deadline) {
  Hello heard;
  if (!readable(socket, deadline) || ::recv(socket.get(), &heard, sizeof heard, 0) != sizeof heard) return -1;
  return heard.token == hello(token, 0).token ? heard.from : -1;
}

void send_fd(const base::Fd& socket, int fd) {
  char byte = 'f';
  iovec text{&byte, 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof fd)> control{};
  msghdr message{};
  message.msg_iov = &text;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  if (::sendmsg(socket.get(), &message, MSG_NOSIGNAL) != 1) {
    throw base::Error(str("cannot pass shared memory to a neighbour: ", base::system_error()));
  }
}

base::Fd receive_fd(const base::Fd& socket, const std::string& from, base::Deadline deadline) {
  if (!readable(socket, deadline)) throw base::TimeoutError(str(from, " did not pass its shared memory in time"));
  char byte = 0;
  iovec text{&byte, 1};
  int fd = -1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof fd)> control{};
  msghdr message{};
  message.msg_iov = &text;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const auto got = ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
  const cmsghdr* header = got == 1 ? CMSG_FIRSTHDR(&message) : nullptr;
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) {
    throw base::PeerError(str(from, " ended before it had passed its shared memory"));
  }
  std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
  return base::Fd(fd);
}

}  // namespace

Neighbours::Neighbours(Board& board, int rank, std::vector<std::string> names, base::Deadline deadline)
    : rank_(rank), names_(std::move(names)), sockets_(names_.size()) {
  why_not_ = meet(board, deadline);
  if (!why_not_.empty()) sockets_ = std::vector<base::Fd>(names_.size());
  for (const auto& socket : sockets_) {
    if (socket) base::close_in_forked_children(socket.get());
  }
}

Neighbours::~Neighbours() {
  for (const auto& socket : sockets_) {
    if (socket) base::keep_in_forked_children(socket.get());
  }
}

std::string Neighbours::meet(Board& board, base::Deadline deadline) {
  const auto listening = listen(size());
  const auto here = host();
  const auto put = [&](const char* what, const std::string& word) { board.put(str(what, "/", rank_), word); };
  const auto get = [&](const char* what, int member) {
    try {
      return board.get(str(what, "/", member));
    } catch (const base::TimeoutError&) {
      throw base::TimeoutError(str(name(member), " has not come in time to make the group with ", name(rank_)));
    }
  };
  put("host", here);
  put("address", address_of(listening));
  put("token", random_token());
  std::vector<std::string> addresses, tokens;
  for (int member = 0; member < size(); ++member) {
    if (get("host", member) != here) return str(name(rank_), " and ", name(member), " are not on one host");
    addresses.push_back(get("address", member));
    tokens.push_back(get("token", member));
  }
  std::string vote;
  try {
    connect(addresses, tokens, listening, deadline);
  } catch (const base::Error& error) {
    vote = str(name(rank_), ": ", error.what());
  }
  put("vote", vote);
  std::string why_not;
  for (int member = 0; member < size(); ++member) {
    if (why_not.empty()) why_not = get("vote", member);
  }
  return why_not;
}

void Neighbours::connect(const std::vector<std::string>& addresses, const std::vector<std::string>& tokens,
                         const base::Fd& listening, base::Deadline deadline) {
  for (int lower = 0; lower < rank_; ++lower) {
    sockets_[lower] = connect_to(addresses[lower]);
    if (!of_this_user(sockets_[lower])) throw base::Error(str(name(lower), " is a process of another user"));
    say(sockets_[lower], hello(tokens[lower], rank_));
  }
  for (int missing = size() - 1 - rank_; missing > 0;) {
    if (!readable(listening, deadline)) throw base::TimeoutError(str(missing, " of the others did not connect"));
    base::Fd socket(::accept4(listening.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket || !of_this_user(socket)) continue;
    const int from =
        hear(socket, tokens[rank_], base::Deadline::after(std::min(kGreeting, deadline.at() - Clock::now())));
    if (from <= rank_ || from >= size() || sockets_[from]) continue;
    say(socket, hello(tokens[from], rank_));
    sockets_[from] = std::move(socket);
    --missing;
  }
  for (int lower = 0; lower < rank_; ++lower) {
    if (hear(sockets_[lower], tokens[rank_], deadline) != lower) throw base::Error(str(name(lower), " did not answer"));
  }
}

std::vector<Segment> Neighbours::share(std::size_t bytes, base::Deadline deadline) const {
  Segment own(bytes);
  for (const auto& socket : sockets_) {
    if (socket) send_fd(socket, own.fd());
  }
  std::vector<Segment> segments;
  const auto receive = [&](int first, int last) {
    for (int member = first; member < last; ++member) {
      segments.emplace_back(receive_fd(sockets_[member], name(member), deadline), bytes);
    }
  };
  receive(0, rank_);
  segments.push_back(std::move(own));
  receive(rank_ + 1, size());
  return segments;
}

bool Neighbours::lost(int member) const {
  if (!sockets_[member]) return false;
  pollfd one{sockets_[member].get(), POLLRDHUP, 0};
  return ::poll(&one, 1, 0) > 0 && (one.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

}  // namespace lamina::shared_memory
