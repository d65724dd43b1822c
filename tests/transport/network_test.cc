// SPDX-License-Identifier: Apache-2.0
// The in-process network keeps what transport.h promises of every transport.
#include "lamina/transport/inproc/network.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "lamina/base/error.h"
#include "lamina/transport/loopback/loopback.h"
#include "tests/transport/inbox.h"

namespace lamina::transport {
namespace {

TEST(Network, KeepsTheOrderOfEachPairAndNoOther) {
  bool mixed = false;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    inproc::Network network(3, seed);
    Inbox inbox;
    auto a = network.connect(base::Rank(0)), b = network.connect(base::Rank(1)), to = network.connect(base::Rank(2));
    for (int i = 0; i < 10; ++i) {
      send(*a, 2, std::to_string(i));
      send(*b, 2, std::to_string(i));
    }
    to->start(inbox.events());  // what came before is delivered now
    std::string of_a, of_b;
    for (const auto& text : inbox.wait(20)) (text[0] == '0' ? of_a : of_b) += text[2];
    EXPECT_EQ(of_a, "0123456789");
    EXPECT_EQ(of_b, "0123456789");
    mixed |= inbox.wait(1)[0] != "0:0";
    to->close(true);
  }
  EXPECT_TRUE(mixed);
}

TEST(Network, ARankMaySendToItself) {
  inproc::Network network(1, 0);
  Inbox inbox;
  auto self = network.connect(base::Rank(0));
  self->start(inbox.events());
  send(*self, 0, "hello");
  EXPECT_EQ(inbox.wait(1)[0], "0:hello");
  self->close(true);
}

TEST(Network, WhatIsDeliveredIsAPrivateCopy) {
  inproc::Network network(2, 0);
  Inbox inbox;
  auto from = network.connect(base::Rank(0)), to = network.connect(base::Rank(1));
  auto tensor = at::zeros({3});
  send(*from, 1, "", tensor);
  tensor.fill_(1);
  to->start(inbox.events());
  inbox.wait(1);
  EXPECT_TRUE(at::equal(inbox.body(0).as<at::Tensor>(), at::zeros({3})));
  to->close(true);
}

TEST(Network, ALostRankIsToldOfOnceAndAfterWhatItSent) {
  inproc::Network network(3, 0);
  Inbox inbox;
  auto lost = network.connect(base::Rank(0)), survivor = network.connect(base::Rank(1));
  send(*lost, 1, "last words");
  network.kill(base::Rank(0));
  network.kill(base::Rank(0));
  send(*lost, 1, "from the grave");
  survivor->start(inbox.events());
  EXPECT_EQ(inbox.wait(2), (std::vector<std::string>{"0:last words", "lost 0"}));
  EXPECT_THROW(send(*survivor, 0, ""), base::PeerError);
  send(*survivor, 1, "own");
  EXPECT_EQ(inbox.wait(3)[2], "1:own");
  survivor->close(true);
  EXPECT_EQ(inbox.size(), 3);
}

TEST(Network, AMessageThatItsReaderFindsMalformedIsDroppedWithAWarning) {
  inproc::Network network(2, 0);
  Inbox inbox;
  auto from = network.connect(base::Rank(0)), to = network.connect(base::Rank(1));
  auto events = inbox.events();
  events.message = [next = events.message](Message message) {
    if (message.fields == "bad") throw base::FormatError("no such thing");
    next(std::move(message));
  };
  testing::internal::CaptureStderr();
  to->start(std::move(events));
  send(*from, 1, "bad");
  send(*from, 1, "good");
  EXPECT_EQ(inbox.wait(1)[0], "0:good");
  EXPECT_NE(testing::internal::GetCapturedStderr().find("dropped a message of rank 0: no such thing"),
            std::string::npos);
  to->close(true);
}

TEST(Network, AfterCloseNothingIsDelivered) {
  inproc::Network network(2, 0);
  Inbox inbox;
  auto from = network.connect(base::Rank(0)), to = network.connect(base::Rank(1));
  to->start(inbox.events());
  send(*from, 1, "1");
  inbox.wait(1);
  to->close(true);
  send(*from, 1, "2");
  network.kill(base::Rank(0));
  to->close(false);  // again
  EXPECT_EQ(inbox.size(), 1);
}

TEST(Network, ARankOutsideItIsAnError) {
  inproc::Network network(2, 0);
  auto from = network.connect(base::Rank(0));
  EXPECT_THROW(send(*from, 2, ""), base::InternalError);
  EXPECT_THROW(send(*from, -1, ""), base::InternalError);
}

// Either end of a put between two ranks that `connect` gives.
void put_between(Transport& from, Transport& to) {
  const base::Patience patience{std::chrono::seconds(30), [] {}};
  const auto one = at::ones({3});
  const auto bytes = [&](auto name, auto memory) { return Parcel{name, "", memory}; };
  for (const bool put_first : {true, false}) {
    const auto place = at::zeros({3}), other = at::zeros({4});
    auto put = put_first ? from.put(to.rank(), bytes("a", one)) : nullptr;
    const auto post = to.post(from.rank(), bytes("a", place));
    if (!put) put = from.put(to.rank(), bytes("a", one));
    put->wait(patience);
    post->wait(patience);
    EXPECT_TRUE(at::equal(place, one));
    const auto less = from.put(to.rank(), bytes("b", one)), more = to.post(from.rank(), bytes("b", other));
    EXPECT_THROW(less->wait(patience), base::DesyncError);
    EXPECT_THROW(more->wait(patience), base::DesyncError);
    EXPECT_TRUE(at::equal(other, at::zeros({4})));
    static_cast<void>(to.post(from.rank(), bytes("c", other)));
    const auto refused = from.put(to.rank(), bytes("c", at::ones({4})));
    EXPECT_THROW(refused->wait(patience), base::CancelledError);
    EXPECT_TRUE(at::equal(other, at::zeros({4})));
  }
}

TEST(Network, WhatIsPutComesToWhereItIsPosted) {
  inproc::Network network(2, 0);
  const auto a = network.connect(base::Rank(0)), b = network.connect(base::Rank(1));
  put_between(*a, *b);
  put_between(*a, *a);
}

TEST(Network, ALostRankEndsTheTransfersWithIt) {
  inproc::Network network(2, 0);
  const auto a = network.connect(base::Rank(0)), b = network.connect(base::Rank(1));
  const base::Patience patience{std::chrono::seconds(30), [] {}};
  const auto post = a->post(base::Rank(1), {"x", "", at::zeros({3})}),
             put = a->put(base::Rank(1), {"y", "", at::ones(3)});
  network.kill(base::Rank(1));
  EXPECT_THROW(post->wait(patience), base::PeerError);
  EXPECT_THROW(put->wait(patience), base::PeerError);
}

TEST(Loopback, WhatIsPutComesToWhereItIsPosted) {
  Loopback loopback;
  put_between(loopback, loopback);
}

TEST(Loopback, DeliversToItselfAPrivateCopyInTheSendersThread) {
  Loopback loopback;
  Inbox inbox;
  loopback.start(inbox.events());
  auto tensor = at::zeros({3});
  send(loopback, 0, "x", tensor);
  tensor.fill_(1);
  ASSERT_EQ(inbox.size(), 1);
  EXPECT_TRUE(at::equal(inbox.body(0).as<at::Tensor>(), at::zeros({3})));
  EXPECT_THROW(send(loopback, 1, ""), base::InternalError);
}

}  // namespace
}  // namespace lamina::transport
