// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <thread>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/transport/ucx/probe.h"
#include "tests/transport/rank_processes.h"

namespace lamina::transport {
namespace {

using base::Rank;
using testing::Inbox;
using testing::object;
using testing::RankProcesses;
using value::List;

const std::vector<std::int64_t> kSizes = {0, 1, 63, 4096, 8192, 8193, 60000, 1 << 20, 64 << 20};

at::Tensor pattern(std::int64_t bytes, std::int64_t seed) { return at::arange(seed, seed + bytes).to(at::kByte); }

std::int64_t integer(const value::Value& tree, std::size_t at) {
  return tree.as<List>().items.at(at).as<std::int64_t>();
}
const at::Tensor& tensor(const value::Value& tree, std::size_t at) {
  return tree.as<List>().items.at(at).as<at::Tensor>();
}

TEST(Ucx, TwoRanksExchangeTensorsOfAllSizes) {
  RankProcesses job(2);
  job.run([](Transport& transport, Inbox& inbox) {
    const std::int64_t me = transport.rank().value;
    const Rank other(1 - me);
    std::thread sender([&] {
      for (const auto size : kSizes) transport.send(other, object("c", List{{size, pattern(size, me)}}));
    });
    for (const auto size : kSizes) {
      const Message message = inbox.next();
      EXPECT_EQ(message.channel, "c");
      EXPECT_EQ(integer(message.body, 0), size);
      EXPECT_TRUE(at::equal(tensor(message.body, 1), pattern(size, other.value))) << size;
    }
    sender.join();
  });
  job.expect_success();
}

}  // namespace
}  // namespace lamina::transport
