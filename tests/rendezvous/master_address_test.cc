// SPDX-License-Identifier: Apache-2.0
#include "lamina/rendezvous/master_address.h"

#include <gtest/gtest.h>

#include "lamina/rendezvous/socket.h"

namespace lamina::rendezvous {
namespace {

// Names that lead to the loopback device are tried between network namespaces, by tests/launch/test_launch_machines.py.
TEST(MasterAddress, InNumbersAndLocalhostAreTakenAsTheyAre) {
  for (const char* address : {"127.0.0.1", "127.0.1.1", "::1", "10.0.0.1", "localhost"}) {
    const environment::World world{
        .size = 2, .local_size = 1, .master_addr = address, .master_port = 29500, .launched = true};
    EXPECT_EQ(meeting_outside(world).master_addr, address);
  }
}

TEST(Address, OfThisMachineHasAnInterfaceAndAnotherMachinesHasNone) {
  EXPECT_EQ(Address::local_towards("127.0.0.1", 29500).interface(), "lo");
  EXPECT_EQ(Address::parse("192.0.2.1 29500").interface(), "");
}

}  // namespace
}  // namespace lamina::rendezvous
