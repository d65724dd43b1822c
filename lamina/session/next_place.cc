// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/next_place.h"

#include <stdlib.h>  // setenv

#include <cstdlib>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/environment/address.h"
#include "lamina/environment/rank_contract.h"
#include "lamina/session/newcomer.h"
#include "lamina/session/next_epoch.h"
#include "lamina/session/session.h"

namespace lamina::session {
namespace {

constexpr auto kEpoch = "LAMINA_EPOCH";
constexpr auto kHere = "127.0.0.1";
constexpr const char* kPlace[] = {"RANK",        "LOCAL_RANK",  "WORLD_SIZE", "LOCAL_WORLD_SIZE",
                                  "MASTER_ADDR", "MASTER_PORT", kEpoch};

int port_of(const base::Fd& socket) {
  const auto text = environment::Address::bound_to(socket).text();
  return std::stoi(text.substr(text.rfind(' ') + 1));
}

// Where a rank's machine is for others: its address on the network over which they meet, where it has one there.
std::string address_of(const Session& session, base::Rank rank) {
  const auto& seats = session.seats();
  if (seats.empty()) return kHere;
  const auto& host = seats[static_cast<std::size_t>(rank.value)].host;
  try {
    return environment::Address::parse(host + " 0").host();
  } catch (const base::FormatError&) {  // a name: all are on one machine
    return kHere;
  }
}

}  // namespace

FreePort::FreePort(const Session& session)
    : socket_(environment::Address::parse(base::str(address_of(session, session.world().rank), " 0")).listen()),
      number_(port_of(socket_)) {}

std::int64_t epoch_of_environment() {
  const char* const number = std::getenv(kEpoch);
  return number == nullptr ? 0 : std::atoll(number);
}

environment::World next_place(const Session& before, const NextEpoch& next, int port) {
  const auto local = local_place(nodes_of(before, next), next.rank);
  return {.rank = base::Rank(next.rank),
          .size = next.size(),
          .local_rank = local.rank,
          .local_size = local.size,
          .node_rank = before.world().node_rank,
          .master_addr = address_of(before, next.members.front()),
          .master_port = port,
          .launched = true};
}

environment::World next_place(const Session& own, const NewPlace& place) {
  return {.rank = base::Rank(place.rank),
          .size = place.size,
          .local_rank = place.local.rank,
          .local_size = place.local.size,
          .node_rank = own.world().node_rank,
          .master_addr = place.host,
          .master_port = place.port,
          .launched = true};
}

void take_place(const environment::World& world, std::int64_t epoch) {
  const auto set = [](const char* name, const auto& value) { ::setenv(name, base::str(value).c_str(), 1); };
  set("RANK", world.rank.value);
  set("LOCAL_RANK", world.local_rank);
  set("WORLD_SIZE", world.size);
  set("LOCAL_WORLD_SIZE", world.local_size);
  set("MASTER_ADDR", world.master_addr);
  set("MASTER_PORT", world.master_port);
  set(kEpoch, epoch);
  ::unsetenv(environment::kNewcomerVariable);
}

std::vector<std::pair<std::string, std::string>> said_place() {
  std::vector<std::pair<std::string, std::string>> said;
  for (const char* const name : kPlace) {
    if (const char* const value = std::getenv(name)) said.emplace_back(name, value);
  }
  return said;
}

}  // namespace lamina::session
