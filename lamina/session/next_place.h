// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lamina/base/fd.h"
#include "lamina/environment/world.h"

namespace lamina::session {

class Session;
struct NewPlace;
struct NextEpoch;

// A port of this machine at which the ranks of a session may meet, at that address. Nobody else is given it while this
// is there.
class FreePort {
 public:
  explicit FreePort(const Session& session);
  int number() const { return number_; }

 private:
  const base::Fd socket_;
  const int number_;
};

// How often this process has changed the others of its job (LAMINA_EPOCH), as the environment says.
std::int64_t epoch_of_environment();

// The place of this rank among those who go on. They meet at that port of the first one's machine.
environment::World next_place(const Session& before, const NextEpoch& next, int port);
// The place of a newcomer.
environment::World next_place(const Session& own, const NewPlace& place);

// Has the environment say who this rank is from now on, as a launcher does; a newcomer is one no more.
void take_place(const environment::World& world, std::int64_t epoch);

// Lists what the environment says so, names and values, for faces with an environment of their own.
std::vector<std::pair<std::string, std::string>> said_place();

}  // namespace lamina::session
