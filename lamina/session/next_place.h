// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lamina/base/fd.h"
#include "lamina/environment/world.h"

namespace lamina::session {

// A port of this machine at which ranks may meet. Nobody else is given it while this is there.
class FreePort {
 public:
  FreePort();
  int number() const { return number_; }

 private:
  const base::Fd socket_;
  const int number_;
};

// How often this process has changed the others of its job (LAMINA_EPOCH), as the environment says.
std::int64_t epoch_of_environment();

// The place of that rank among so many, all of this machine, who meet at that port.
environment::World next_place(int rank, int size, int port);

// Has the environment say who this rank is from now on, as a launcher does; a newcomer is one no more.
void take_place(const environment::World& world, std::int64_t epoch);

// What the environment says so: names and values, for faces with an environment of their own.
std::vector<std::pair<std::string, std::string>> said_place();

}  // namespace lamina::session
