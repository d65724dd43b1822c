// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <list>
#include <utility>
#include <vector>

#include "lamina/base/fd.h"
#include "lamina/contact/handshake.h"
#include "lamina/environment/address.h"

namespace lamina::contact {

// A place where strangers come, until they have proven that they have the secret. Nothing here blocks. Forked children
// have it no more.
class Reception {
 public:
  // Listens there, as `self`. Of more than `most` strangers at once the one goes that came first.
  Reception(const environment::Address& address, Identity self, std::size_t most);
  ~Reception();
  Reception(const Reception&) = delete;

  environment::Address address() const { return environment::Address::bound_to(listener_); }
  // Descriptors that poll() should wait for, with their events.
  std::vector<std::pair<int, short>> awaited() const;
  // Lets all of them go on. Returns the connections with those who have proven it.
  std::vector<Connection> take();

 private:
  void accept_all();

  const Identity self_;
  const std::size_t most_;
  base::Fd listener_;
  std::list<Handshake> strangers_;
};

}  // namespace lamina::contact
