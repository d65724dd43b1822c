// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/next_place.h"

#include <stdlib.h>  // setenv

#include <cstdlib>

#include "lamina/base/str.h"
#include "lamina/environment/rank_contract.h"
#include "lamina/rendezvous/socket.h"

namespace lamina::session {
namespace {

constexpr auto kEpoch = "LAMINA_EPOCH";
constexpr const char* kPlace[] = {"RANK",        "LOCAL_RANK",  "WORLD_SIZE", "LOCAL_WORLD_SIZE",
                                  "MASTER_ADDR", "MASTER_PORT", kEpoch};

int port_of(const base::Fd& socket) {
  const auto text = rendezvous::Address::bound_to(socket).text();
  return std::stoi(text.substr(text.rfind(' ') + 1));
}

}  // namespace

FreePort::FreePort() : socket_(rendezvous::Address::parse("127.0.0.1 0").listen()), number_(port_of(socket_)) {}

std::int64_t epoch_of_environment() {
  const char* const number = std::getenv(kEpoch);
  return number == nullptr ? 0 : std::atoll(number);
}

environment::World next_place(int rank, int size, int port) {
  return {.rank = base::Rank(rank),
          .size = size,
          .local_rank = rank,
          .local_size = size,
          .master_port = port,
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
