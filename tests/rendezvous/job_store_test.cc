// SPDX-License-Identifier: Apache-2.0
#include "lamina/rendezvous/job_store.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tests/reserved_port.h"

namespace lamina::rendezvous {
namespace {

// Another process may be ahead, and have met again.
TEST(JobStore, ForgetsMeetingsThatAreOverAndNothingElse) {
  const test::ReservedPort port;
  JobStore store({.host = "127.0.0.1",
                  .port = port.number(),
                  .is_host = true,
                  .deadline = base::Deadline::after(std::chrono::seconds(20)),
                  .check_interrupt = {}});
  const auto before = store.c10d()->listKeys().size();
  std::string last;
  for (int time = 0; time < 11; ++time) {
    for (const auto* kind : {kJoin, kGroups}) {
      last = next_meeting(kind);
      store.claim(last + "process/0", "0");
      store.set(last + "rank 0/address", "there");
    }
  }
  const auto number = last.rfind("11/");
  ASSERT_NE(number, std::string::npos);
  const auto next = last.substr(0, number) + "12/address", other = next_meeting("places") + "address";
  store.set(next, "here");
  store.set(other, "here");
  store.set("a script's own", "here");

  store.forget_meetings();
  EXPECT_EQ(store.c10d()->listKeys().size(), before + 3);
  for (const auto& key : {next, other, std::string("a script's own")}) EXPECT_EQ(store.get(key), "here");
}

}  // namespace
}  // namespace lamina::rendezvous
