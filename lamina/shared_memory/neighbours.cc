// SPDX-License-Identifier: Apache-2.0
// How they meet, each step on all members, over the board:
//
//   cards (host, address, token) -> all on one host? -> connect to the lower ones, accept the higher ones -> votes
//
// Whoever connects says the token of the member that it means, and is answered with its own: only who reads the board
// knows them. The kernel says which user it is. The sockets' addresses are the kernel's own choice and end with them. A
// member closes its sockets after its vote: one whose sockets are closed has voted, or its process has ended.
#include "lamina/shared_memory/neighbours.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <exception>
#include <fstream>
#include <optional>
#include <thread>

#include "lamina/base/deadline.h"
#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"

namespace lamina::shared_memory {
namespace {

using base::str;

using base::Clock;

constexpr std::size_t kTokenBytes = 16;
constexpr Clock::duration kGreeting = std::chrono::seconds(1);         // for a stranger who connects and says nothing
constexpr Clock::duration kLook = std::chrono::milliseconds(500);      // between looks for members that have ended
constexpr Clock::duration kLastWord = std::chrono::seconds(1);         // under way from a member that has ended
constexpr std::string_view kUnable = "unable: ", kLost = "is lost: ";  // what a word on the board begins with

// Another member, whose sockets are closed.
struct Gone : std::exception {
  explicit Gone(int member) : member(member) {}
  int member;
};

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

// True where the other end of a connection is closed, by `errno`.
bool is_closed() { return errno == EPIPE || errno == ECONNRESET; }

bool out_of_descriptors() { return errno == EMFILE || errno == ENFILE; }

// Processes of which this is the same can reach each other's sockets; that they share memory is tried. If the kernel
// does not name its boot, the rest has to do.
std::string host() {
  constexpr auto kBoot = "/proc/sys/kernel/random/boot_id";
  errno = 0;
  std::ifstream file(kBoot);
  if (!file && out_of_descriptors()) throw base::Error(str("cannot read ", kBoot, ": ", base::system_error()));
  std::string boot;
  std::getline(file, boot);
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

// A socket that is connected, or none: errno says why. Waits for nobody.
base::Fd try_to_connect(const std::string& name) {
  auto socket = checked(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), "make a socket");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof address.sun_path) throw base::Error("a local socket's name is too long");
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) return {};
  ::fcntl(socket.get(), F_SETFL, 0);  // what follows may wait
  return socket;
}

// Others that want to connect may be in the way.
base::Fd connect_to(const std::string& name, base::Deadline deadline) {
  while (true) {
    auto socket = try_to_connect(name);
    if (socket) return socket;
    if (errno != EAGAIN || deadline.expired()) {
      throw base::Error(str("cannot connect to a local socket: ", base::system_error()));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

bool listens(const std::string& name) { return try_to_connect(name) || errno != ECONNREFUSED; }

bool of_this_user(const base::Fd& socket) {
  ucred other{};
  socklen_t length = sizeof other;
  return ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &other, &length) == 0 && other.uid == ::geteuid();
}

// Waits until something can be read. False when the deadline comes first.
bool readable(const base::Fd& socket, base::Deadline deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.at() - base::Clock::now());
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

void say(const base::Fd& socket, const Hello& hello, int to) {
  if (::send(socket.get(), &hello, sizeof hello, MSG_NOSIGNAL) == sizeof hello) return;
  if (is_closed()) throw Gone(to);
  throw base::Error(str("cannot greet a neighbour: ", base::system_error()));
}

// The rank that greets with this token; -1 for anything else.
int hear(const base::Fd& socket, const std::string& token, base::Deadline deadline) {
  Hello heard;
  if (!readable(socket, deadline) || ::recv(socket.get(), &heard, sizeof heard, 0) != sizeof heard) return -1;
  return heard.token == hello(token, 0).token ? heard.from : -1;
}

// Words that members say to each other on their sockets.
enum class Word : char { kDescriptor = 'd', kUnable = 'x', kDone = 'k' };

void say(const base::Fd& socket, Word word, const std::string& to) {
  if (::send(socket.get(), &word, 1, MSG_NOSIGNAL) != 1) {
    throw base::PeerError(str(to, " ended before it had shared its memory"));
  }
}

void send_fd(const base::Fd& socket, int fd) {
  auto byte = static_cast<char>(Word::kDescriptor);
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

// The next word of a member; with a descriptor, into `fd`, if it sends one.
Word hear_word(const base::Fd& socket, const std::string& from, base::Deadline deadline, base::Fd* fd = nullptr) {
  if (!readable(socket, deadline)) throw base::TimeoutError(str(from, " did not share its memory in time"));
  char byte = 0;
  iovec text{&byte, 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &text;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  if (::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC) != 1) {
    throw base::PeerError(str(from, " ended before it had shared its memory"));
  }
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  int received = -1;
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS) std::memcpy(&received, CMSG_DATA(header), sizeof received);
  base::Fd owned(received);
  if (fd != nullptr) *fd = std::move(owned);
  return static_cast<Word>(byte);
}

// The segment of another member. The kernel leaves a descriptor out where this process may have no more.
Segment receive_segment(const base::Fd& socket, const std::string& from, std::size_t bytes, base::Deadline deadline) {
  base::Fd fd;
  if (hear_word(socket, from, deadline, &fd) != Word::kDescriptor) {
    throw base::Error(str(from, " could not make its shared memory: see its own error"));
  }
  if (!fd) throw base::Error(str("cannot take shared memory of ", from, ": ", base::system_error(EMFILE)));
  return {std::move(fd), bytes};
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

// A child of fork() has closed its copies; what has their numbers now is the child's own.
Neighbours::~Neighbours() {
  for (auto& socket : sockets_) {
    if (process_.forked()) {
      socket.release();
    } else if (socket) {
      base::keep_in_forked_children(socket.get());
    }
  }
}

std::string Neighbours::meet(Board& board, base::Deadline deadline) {
  const auto put = [&](const char* what, const std::string& word) { board.put(str(what, "/", rank_), word); };
  const auto get = [&](const char* what, int member) {
    try {
      return board.get(str(what, "/", member), [] {});
    } catch (const base::TimeoutError&) {
      throw base::TimeoutError(str(name(member), " has not come in time to make the group with ", name(rank_)));
    }
  };
  std::string here;
  base::Fd listening;
  try {
    listening = listen(2 * size());
    here = host();
  } catch (const base::Error& error) {
    put("host", str(kUnable, error.what()));
    return str(name(rank_), ": ", error.what());
  }
  put("host", here);
  put("address", address_of(listening));
  put("token", random_token());
  std::vector<Card> cards;
  for (int member = 0; member < size(); ++member) {
    const auto there = get("host", member);
    if (there.starts_with(kUnable)) return str(name(member), ": ", there.substr(kUnable.size()));
    if (there != here) return str(name(rank_), " and ", name(member), " are not on one host");
    cards.push_back({get("address", member), get("token", member)});
  }
  std::string vote = connect(board, cards, listening, deadline);
  put("vote", vote);
  listening = {};
  for (int member = 0; vote.empty() && member < size(); ++member) {
    if (member != rank_) vote = vote_of(board, member);
  }
  if (vote.starts_with(kLost)) throw base::PeerError(vote.substr(kLost.size()));
  return vote;
}

// The vote of this member: "" when it is connected to all others, else why it is not.
std::string Neighbours::connect(Board& board, const std::vector<Card>& cards, const base::Fd& listening,
                                base::Deadline deadline) {
  try {
    connect_to_lower(cards, deadline);
    accept_higher(cards, listening, deadline);
    for (int lower = 0; lower < rank_; ++lower) {
      if (hear(sockets_[lower], cards[rank_].token, deadline) == lower) continue;
      if (!listens(cards[lower].address)) throw Gone(lower);
      throw base::Error(str(name(lower), " did not answer"));
    }
    return "";
  } catch (const Gone& gone) {
    return vote_of(board, gone.member);
  } catch (const base::Error& error) {
    return str(name(rank_), ": ", error.what());
  }
}

void Neighbours::connect_to_lower(const std::vector<Card>& cards, base::Deadline deadline) {
  for (int lower = 0; lower < rank_; ++lower) {
    try {
      sockets_[lower] = connect_to(cards[lower].address, deadline);
      if (!of_this_user(sockets_[lower])) throw base::Error(str(name(lower), " is a process of another user"));
      say(sockets_[lower], hello(cards[lower].token, rank_), lower);
    } catch (const base::Error&) {
      if (!listens(cards[lower].address)) throw Gone(lower);
      throw;
    }
  }
}

void Neighbours::accept_higher(const std::vector<Card>& cards, const base::Fd& listening, base::Deadline deadline) {
  const auto soon = [&](Clock::duration span) {
    return base::Deadline::after(std::min(span, deadline.at() - Clock::now()));
  };
  for (int missing = size() - 1 - rank_; missing > 0;) {
    if (deadline.expired()) throw base::TimeoutError(str(missing, " of the others did not connect"));
    if (!readable(listening, soon(kLook))) {
      for (int higher = rank_ + 1; higher < size(); ++higher) {
        if (!sockets_[higher] && !listens(cards[higher].address)) throw Gone(higher);
      }
      continue;
    }
    base::Fd socket(::accept4(listening.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket && (out_of_descriptors() || errno == ENOBUFS || errno == ENOMEM)) {
      throw base::Error(str("cannot accept another member: ", base::system_error()));
    }
    if (!socket || !of_this_user(socket)) continue;
    const int from = hear(socket, cards[rank_].token, soon(kGreeting));
    if (from <= rank_ || from >= size() || sockets_[from]) continue;
    say(socket, hello(cards[from].token, rank_), from);
    sockets_[from] = std::move(socket);
    --missing;
  }
}

// The vote of another member; one that has ended gets one here. A vote may still be on its way when the sockets of its
// member are closed.
std::string Neighbours::vote_of(Board& board, int member) const {
  std::optional<base::Deadline> closed;
  try {
    return board.get(str("vote/", member), [&] {
      if (closed && closed->expired()) throw Gone(member);
      if (!closed && (!sockets_[member] || lost(member))) closed = base::Deadline::after(kLastWord);
    });
  } catch (const Gone&) {
    return str(kLost, name(member), " is lost: its process ended while the group was made");
  }
}

std::vector<Segment> Neighbours::share(std::size_t bytes, base::Deadline deadline) const {
  const auto others = [&](const auto& work) {
    for (int member = 0; member < size(); ++member) {
      if (sockets_[member]) work(member);
    }
  };
  std::vector<std::optional<Segment>> segments(size());
  std::string failure;
  const auto attempt = [&](const auto& work) {
    try {
      work();
    } catch (const base::PeerError&) {
      throw;
    } catch (const base::TimeoutError&) {
      throw;
    } catch (const base::Error& error) {
      if (failure.empty()) failure = error.what();
    }
  };
  attempt([&] { segments[rank_].emplace(bytes); });
  others([&](int member) {
    segments[rank_] ? send_fd(sockets_[member], segments[rank_]->fd())
                    : say(sockets_[member], Word::kUnable, name(member));
  });
  others([&](int member) {
    attempt([&] { segments[member] = receive_segment(sockets_[member], name(member), bytes, deadline); });
  });
  // All have it, or none.
  others([&](int member) { say(sockets_[member], failure.empty() ? Word::kDone : Word::kUnable, name(member)); });
  others([&](int member) {
    if (hear_word(sockets_[member], name(member), deadline) == Word::kDone || !failure.empty()) return;
    failure = str(name(member), " could not share memory: see its own error");
  });
  if (!failure.empty()) throw base::Error(failure);
  segments[rank_]->close_fd();
  std::vector<Segment> all;
  for (auto& segment : segments) all.push_back(std::move(*segment));
  return all;
}

bool Neighbours::lost(int member) const {
  if (!sockets_[member]) return false;
  pollfd one{sockets_[member].get(), POLLRDHUP, 0};
  return ::poll(&one, 1, 0) > 0 && (one.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

}  // namespace lamina::shared_memory
