// SPDX-License-Identifier: Apache-2.0
#include "lamina/contact/line.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <string>

#include "lamina/base/error.h"

namespace lamina::contact {
namespace {

struct Ends {
  Ends() {
    std::array<int, 2> sockets{};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets.data()) != 0) throw base::Error("no sockets");
    one = {.socket = base::Fd(sockets[0]), .outgoing = {1}, .incoming = {2}};
    other = {.socket = base::Fd(sockets[1]), .outgoing = {2}, .incoming = {1}};
  }
  Connection one, other;
};

TEST(Line, CarriesWordsInTheirOrderBothWays) {
  Ends ends;
  Line one(std::move(ends.one)), other(std::move(ends.other));
  EXPECT_EQ(other.hear(), std::nullopt);
  const std::string large(5000, 'x');
  for (const auto& word : {std::string("first"), std::string(), large}) EXPECT_TRUE(one.say(word));
  EXPECT_EQ(other.hear(), "first");
  EXPECT_EQ(other.hear(), "");
  EXPECT_EQ(other.hear(), large);
  EXPECT_EQ(other.hear(), std::nullopt);
  EXPECT_TRUE(other.say("back"));
  EXPECT_EQ(one.hear(), "back");
}

TEST(Line, EndsWithTheOtherEnd) {
  Ends ends;
  Line one(std::move(ends.one));
  {
    const Line gone(std::move(ends.other));
  }
  EXPECT_THROW(one.hear(), base::PeerError);
  EXPECT_FALSE(one.say("nobody hears this"));
}

TEST(Line, TakesNoWordOfAnotherKeyOrTwice) {
  Ends ends;
  Line other(std::move(ends.other));
  const int raw = ends.one.socket.get();
  std::string bytes;
  {
    Ends copied;
    Line says(std::move(copied.one));
    says.say("word");
    std::array<char, 256> read{};
    const auto count = ::recv(copied.other.socket.get(), read.data(), read.size(), 0);
    bytes.assign(read.data(), static_cast<std::size_t>(count));
  }
  ASSERT_EQ(::send(raw, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  EXPECT_EQ(other.hear(), "word");
  ASSERT_EQ(::send(raw, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  EXPECT_THROW(other.hear(), base::PeerError);
}

}  // namespace
}  // namespace lamina::contact
