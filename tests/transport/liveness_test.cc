// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/liveness.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <random>
#include <set>
#include <thread>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/contact/handshake.h"
#include "lamina/environment/address.h"
#include "lamina/rendezvous/switchboard.h"

namespace lamina::transport {
namespace {

using base::Deadline;
using base::Rank;
using std::chrono::seconds;
using ::testing::HasSubstr;

contact::Identity identity(int rank, int size, std::uint8_t secret = 7) {
  contact::Identity self{Rank(rank), size, {}, "g/", {}};
  self.secret.fill(secret);
  for (int peer = 0; peer < size; ++peer) self.told.push_back(base::str(rank, " to ", peer));
  return self;
}

// The ranks of one mesh as threads of this process.
class Meshes {
 public:
  explicit Meshes(int size) {
    for (int rank = 0; rank < size; ++rank) {
      listeners_.push_back(environment::Address::parse("127.0.0.1 0").listen());
      addresses_.push_back(environment::Address::bound_to(listeners_.back()).text());
    }
    connections_.resize(size);
    errors_.resize(size);
  }

  const std::string& address(int rank) const { return addresses_[rank]; }

  // Connects `rank` on a thread.
  void connect(int rank, std::uint8_t secret = 7, seconds timeout = seconds(30)) {
    threads_.emplace_back([=, this] {
      try {
        connections_[rank] = rendezvous::connect_peers(std::make_unique<rendezvous::Switchboard>(
                                                           identity(rank, static_cast<int>(addresses_.size()), secret),
                                                           std::move(listeners_[rank]), addresses_),
                                                       others(rank), Deadline::after(timeout), {})
                                 .connections;
      } catch (const base::TimeoutError& error) {
        errors_[rank] = error.what();
      }
    });
  }

  void join() {
    for (auto& thread : threads_) thread.join();
    threads_.clear();
  }

  const contact::Connection& connection(int rank, int peer) const { return connections_[rank][peer]; }
  std::unique_ptr<Liveness> liveness(int rank) {
    auto made = std::make_unique<Liveness>(static_cast<int>(addresses_.size()));
    for (const Rank peer : others(rank)) made->add(peer, connections_[rank][peer.value]);
    return made;
  }
  std::string error(int rank) { return errors_[rank]; }

 private:
  std::vector<Rank> others(int rank) const {
    std::vector<Rank> ranks;
    for (int other = 0; other < std::ssize(addresses_); ++other) {
      if (other != rank) ranks.emplace_back(other);
    }
    return ranks;
  }

  std::vector<base::Fd> listeners_;
  std::vector<std::string> addresses_;
  std::vector<std::vector<contact::Connection>> connections_;
  std::vector<std::string> errors_;
  std::vector<std::thread> threads_;
};

// The next notes; none within `patience` gives none.
std::vector<Liveness::Note> next(Liveness& liveness, seconds patience = seconds(2)) {
  pollfd ready{liveness.fd(), POLLIN, 0};
  ::poll(&ready, 1, static_cast<int>(std::chrono::milliseconds(patience).count()));
  return liveness.poll();
}

TEST(Liveness, NotesArriveAndAClosedConnectionIsTheLast) {
  Meshes meshes(2);
  meshes.connect(0);
  meshes.connect(1);
  meshes.join();
  const auto first = meshes.liveness(0);
  auto second = meshes.liveness(1);
  second->note(Rank(0), Liveness::Kind::kBye, 42);
  second.reset();
  std::vector<Liveness::Note> notes;
  while (notes.size() < 2) {
    for (const auto& note : next(*first)) notes.push_back(note);
  }
  EXPECT_EQ(notes[0].kind, Liveness::Kind::kBye);
  EXPECT_EQ(notes[0].value, 42);
  EXPECT_EQ(notes[1].kind, Liveness::Kind::kGone);
  EXPECT_EQ(notes[1].peer, Rank(1));
  EXPECT_EQ(notes[1].why, "its process ended");
}

// Both ends of a connection within this process.
struct Wire {
  Wire() {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    ours = base::Fd(ends[0]);
    theirs = base::Fd(ends[1]);
  }
  base::Fd ours, theirs;
};

std::string receive(const base::Fd& socket) {
  char chunk[512];
  const ssize_t got = ::recv(socket.get(), chunk, sizeof chunk, 0);
  return std::string(chunk, got > 0 ? static_cast<std::size_t>(got) : 0);
}

void send_all(const base::Fd& socket, const std::string& bytes) {
  ASSERT_EQ(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
}

TEST(Liveness, WhoChangesRepeatsOrAddsANoteEndsTheConnection) {
  const auto peer_of_two = [](base::Fd socket, std::uint8_t out, std::uint8_t in) {
    contact::Connection connection{std::move(socket)};
    connection.outgoing.fill(out);
    connection.incoming.fill(in);
    auto liveness = std::make_unique<Liveness>(2);
    liveness->add(Rank(1), connection);
    return liveness;
  };
  for (int attack = 0; attack < 3; ++attack) {
    Wire sent, heard;
    const auto sender = peer_of_two(std::move(sent.ours), 1, 2);
    const auto hearer = peer_of_two(std::move(heard.ours), 2, 1);
    sender->note(Rank(1), Liveness::Kind::kReadable, 5);
    std::string note = receive(sent.theirs);
    send_all(heard.theirs, note);
    ASSERT_EQ(next(*hearer).at(0).value, 5);
    if (attack == 0) {  // it comes again
      send_all(heard.theirs, note);
    } else if (attack == 1) {  // one that was never sent
      send_all(heard.theirs, std::string(note.size(), 'x'));
    } else {
      sender->note(Rank(1), Liveness::Kind::kBye, 6);
      note = receive(sent.theirs);
      note[8] = 7;  // its value
      send_all(heard.theirs, note);
    }
    const auto notes = next(*hearer);
    ASSERT_EQ(notes.size(), 1) << attack;
    EXPECT_EQ(notes[0].kind, Liveness::Kind::kGone);
    EXPECT_EQ(notes[0].why, "somebody interfered with its connection");
  }
}

TEST(Liveness, AForkedChildDoesNotKeepItsDeadParentAlive) {
  Meshes meshes(2);
  meshes.connect(0);
  meshes.connect(1);
  meshes.join();
  const auto first = meshes.liveness(0);
  auto second = meshes.liveness(1);
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  second.reset();
  const auto notes = next(*first);
  ASSERT_EQ(notes.size(), 1);
  EXPECT_EQ(notes[0].kind, Liveness::Kind::kGone);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

TEST(Handshake, StrangersNeitherGetInNorDisturb) {
  Meshes meshes(3);
  std::vector<base::Fd> strangers;
  std::mt19937 random(1);
  for (int rank = 0; rank < 3; ++rank) {
    for (int i = 0; i < 20; ++i) {
      base::Fd stranger = environment::Address::parse(meshes.address(rank)).begin_connect();
      pollfd ready{stranger.get(), POLLOUT, 0};
      ::poll(&ready, 1, 1000);
      std::string noise(i * 13, '\0');  // the first stay silent
      for (char& byte : noise) byte = static_cast<char>(random());
      if (i % 3 == 0) noise = "LAMINA02" + noise;
      if (i > 0) ::send(stranger.get(), noise.data(), noise.size(), MSG_NOSIGNAL);
      strangers.push_back(std::move(stranger));
    }
  }
  const auto begin = std::chrono::steady_clock::now();
  for (int rank = 0; rank < 3; ++rank) meshes.connect(rank);
  meshes.join();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(4));
  const auto second = meshes.liveness(1);
  meshes.liveness(0)->note(Rank(1), Liveness::Kind::kArrived);
  EXPECT_FALSE(next(*second).empty());
}

TEST(Handshake, WithoutTheSecretThereIsNoConnection) {
  Meshes meshes(2);
  meshes.connect(0, 7, seconds(1));
  meshes.connect(1, 8, seconds(1));
  meshes.join();
  EXPECT_THAT(meshes.error(0), HasSubstr("no connection with rank 1"));
  EXPECT_THAT(meshes.error(1), HasSubstr("it lacks this job's secret"));
}

TEST(Handshake, ARankThatStaysAwayIsNamed) {
  Meshes meshes(3);
  meshes.connect(0, 7, seconds(1));
  meshes.connect(1, 7, seconds(1));
  meshes.join();
  EXPECT_EQ(meshes.error(0),
            "no connection with rank 2 in time [start-no-connection]\nmore: lamina explain start-no-connection");
  EXPECT_EQ(meshes.error(1),
            "no connection with rank 2 in time [start-no-connection]\nmore: lamina explain start-no-connection");
}

TEST(Handshake, OfManyThatStayAwayEachIsNamed) {
  Meshes meshes(5);
  meshes.connect(3, 7, seconds(1));
  meshes.join();
  EXPECT_EQ(meshes.error(3),
            "no connection with ranks 0-2, 4 in time [start-no-connection]\nmore: lamina explain start-no-connection");
}

// A handshake of rank 2 with rank 0, and what each of them sent.
struct Recorded {
  std::vector<std::string> messages;
  contact::Connection higher, lower;
};

Recorded shake_hands(std::uint8_t secret = 7) {
  const contact::Identity lower = identity(0, 3, secret), higher = identity(2, 3, secret);
  const auto soon = Deadline::after(std::chrono::hours(1));
  Wire up, down;
  contact::Handshake connector(higher, std::move(up.ours), Rank(0), soon);
  contact::Handshake acceptor(lower, std::move(down.ours), std::nullopt, soon);
  connector.advance();
  Recorded recorded;
  for (int message = 0; message < 4; ++message) {
    const bool to_acceptor = message % 2 == 0;
    recorded.messages.push_back(receive((to_acceptor ? up : down).theirs));
    send_all((to_acceptor ? down : up).theirs, recorded.messages.back());
    (to_acceptor ? acceptor : connector).advance();
  }
  EXPECT_EQ(connector.advance(), contact::Handshake::State::kDone);
  EXPECT_EQ(acceptor.advance(), contact::Handshake::State::kDone);
  recorded.higher = connector.take();
  recorded.lower = acceptor.take();
  return recorded;
}

TEST(Handshake, GivesBothEndsTheSameKeysAndWhatTheOtherTold) {
  const Recorded one = shake_hands();
  EXPECT_EQ(one.higher.outgoing, one.lower.incoming);
  EXPECT_EQ(one.higher.incoming, one.lower.outgoing);
  EXPECT_EQ(one.higher.told, "0 to 2");
  EXPECT_EQ(one.lower.told, "2 to 0");
}

// So neither a frame that comes back to its sender, nor one of an earlier connection or of another job is signed.
TEST(Handshake, NoTwoDirectionsConnectionsOrJobsShareAKey) {
  const Recorded one = shake_hands(), again = shake_hands(), other_job = shake_hands(8);
  const std::set<contact::Secret> keys = {one.higher.outgoing,   one.higher.incoming,       again.higher.outgoing,
                                          again.higher.incoming, other_job.higher.outgoing, other_job.higher.incoming};
  EXPECT_EQ(keys.size(), 6);
}

TEST(Handshake, WhoPlaysOneAgainIsNotLetIn) {
  const Recorded recorded = shake_hands();
  const contact::Identity lower = identity(0, 3), higher = identity(2, 3);
  const auto soon = Deadline::after(std::chrono::hours(1));
  Wire up, down;
  contact::Handshake acceptor(lower, std::move(down.ours), std::nullopt, soon);
  for (const int message : {0, 2}) {
    send_all(down.theirs, recorded.messages[message]);
    EXPECT_NE(acceptor.advance(), contact::Handshake::State::kDone);
  }
  EXPECT_THAT(acceptor.failure(), HasSubstr("lacks the secret"));
  contact::Handshake connector(higher, std::move(up.ours), Rank(0), soon);
  connector.advance();
  send_all(up.theirs, recorded.messages[1]);
  EXPECT_EQ(connector.advance(), contact::Handshake::State::kFailed);
  EXPECT_THAT(connector.failure(), HasSubstr("lacks this job's secret"));
}

std::string damaged(std::string bytes, std::mt19937_64& random) {
  for (auto left = 1 + random() % 3; left > 0; --left) bytes[random() % bytes.size()] ^= 1 << random() % 8;
  if (random() % 8 == 0) bytes.resize(random() % bytes.size());
  return bytes;
}

// LAMINA_SOAK multiplies the rounds.
int rounds() { return std::getenv("LAMINA_SOAK") != nullptr ? 1000000 : 100000; }

TEST(HandshakeFuzz, WhoChangesAnythingOnTheWayIsNotLetIn) {
  const contact::Identity lower = identity(0, 3), higher = identity(2, 3);
  const auto soon = Deadline::after(std::chrono::hours(1));
  std::mt19937_64 random(3);
  for (int i = 0; i < rounds() / 5 && !::testing::Test::HasFailure(); ++i) {
    Wire up, down;  // from the connector, and to the acceptor; between them sits who changes
    contact::Handshake connector(higher, std::move(up.ours), Rank(0), soon);
    contact::Handshake acceptor(lower, std::move(down.ours), std::nullopt, soon);
    auto connected = connector.advance(), accepted = contact::Handshake::State::kRunning;
    const auto victim = random() % 4;  // which of the messages: greeting, answer, proof, what the acceptor tells
    for (std::size_t message = 0; message < 4; ++message) {
      const bool to_acceptor = message % 2 == 0;
      const std::string bytes = receive((to_acceptor ? up : down).theirs);
      if (bytes.empty()) break;
      std::string sent = bytes;
      while (message == victim && sent == bytes) sent = damaged(bytes, random);
      send_all((to_acceptor ? down : up).theirs, sent);
      (to_acceptor ? accepted : connected) = (to_acceptor ? acceptor : connector).advance();
    }
    ASSERT_NE(connected, contact::Handshake::State::kDone) << i;
    if (victim < 3) {
      ASSERT_NE(accepted, contact::Handshake::State::kDone) << i;
    }
  }
}

TEST(HandshakeFuzz, RandomBytesAreNotLetIn) {
  const contact::Identity lower = identity(0, 3);
  const auto soon = Deadline::after(std::chrono::hours(1));
  std::mt19937_64 random(4);
  for (int i = 0; i < rounds() && !::testing::Test::HasFailure(); ++i) {
    Wire wire;
    contact::Handshake acceptor(lower, std::move(wire.ours), std::nullopt, soon);
    std::string noise(random() % 200, '\0');
    for (char& byte : noise) byte = static_cast<char>(random());
    if (random() % 2 == 0) noise = std::string("LAMINA02\2\0\0\0\0\0\0\0", 16) + noise;
    ::send(wire.theirs.get(), noise.data(), noise.size(), MSG_NOSIGNAL);
    while (acceptor.advance() == contact::Handshake::State::kRunning && random() % 2 == 0) {
    }
    ASSERT_NE(acceptor.advance(), contact::Handshake::State::kDone) << i;
  }
}

TEST(Secret, ComesFromAPipeOrAFileAndOnlyOnce) {
  const auto in_a_child = [](const std::function<int()>& descriptor) {
    const pid_t child = ::fork();
    if (child == 0) {
      const int fd = descriptor();
      ::setenv("LAMINA_SECRET_FD", std::to_string(fd).c_str(), 1);
      const auto read = contact::inherited_secret();
      const bool good = read && *read == identity(0, 1, 's').secret && ::getenv("LAMINA_SECRET_FD") == nullptr &&
                        contact::inherited_secret() == read && ::lseek(fd, 0, SEEK_CUR) == -1 && errno == EBADF;
      ::_exit(good ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    return status;
  };
  const std::string secret(32, 's');
  EXPECT_EQ(in_a_child([&] {
              int ends[2];
              EXPECT_EQ(::pipe(ends), 0);
              EXPECT_EQ(::write(ends[1], secret.data(), 16), 16);
              EXPECT_EQ(::write(ends[1], secret.data(), 16), 16);
              return ends[0];
            }),
            0);
  EXPECT_EQ(in_a_child([&] {
              FILE* file = ::tmpfile();
              EXPECT_EQ(::write(fileno(file), secret.data(), 32), 32);
              return fileno(file);
            }),
            0);
}

// HMAC-SHA256 of a key of 32 bytes 0x0b and "Hi There", by another implementation.
TEST(Secret, SignsAsTheStandardSays) {
  contact::Secret key;
  key.fill(0x0b);
  contact::Signer signer(key);
  constexpr contact::Mac kExpected = {0x19, 0x8a, 0x60, 0x7e, 0xb4, 0x4b, 0xfb, 0xc6, 0x99, 0x03, 0xa0,
                                      0xf1, 0xcf, 0x2b, 0xbd, 0xc5, 0xba, 0x0a, 0xa3, 0xf3, 0xd9, 0xae,
                                      0x3c, 0x1c, 0x7a, 0x3b, 0x16, 0x96, 0xa0, 0xb6, 0x8c, 0xf7};
  for (int again = 0; again < 2; ++again) EXPECT_EQ(signer.sign("Hi There"), kExpected);
}

TEST(Secret, WhatIsProvenForOnePurposeProvesNothingElse) {
  const contact::Secret secret = identity(0, 1).secret;
  EXPECT_NE(contact::authenticate(secret, "hello", {"a", "b"}), contact::authenticate(secret, "key", {"a", "b"}));
  EXPECT_NE(contact::authenticate(secret, "key", {"a", "b"}), contact::authenticate(secret, "key", {"ab"}));
  EXPECT_NE(contact::authenticate(secret, "key", {"a", "b"}), contact::authenticate(secret, "keya", {"b"}));
}

}  // namespace
}  // namespace lamina::transport
