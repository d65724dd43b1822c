// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "lamina/transport/liveness.h"
#include "lamina/transport/transport.h"

// The engine does not link UCX: what uses it is a shared library of its own (liblamina_ucx.so), opened when it is
// needed and after the environment is such that UCX installs neither signal handlers nor memory hooks. This is all
// that the two sides know of each other.
namespace lamina::transport::ucx {

// What a rank knows of the others when all have met. Vectors are indexed by rank.
struct Wiring {
  base::Rank rank;
  std::vector<std::string> addresses;
  std::vector<Token> outgoing;  // of the frames we send
  std::vector<Token> incoming;  // of the frames we receive
  std::unique_ptr<Liveness> liveness;
  std::chrono::seconds send_timeout{};
};

// This rank's end, before it is connected.
class Plug {
 public:
  virtual ~Plug() = default;
  virtual std::string address() const = 0;
  virtual std::unique_ptr<Transport> connect(Wiring wiring) = 0;  // once
};

// `one_machine`: all ranks share this machine, so nothing is opened on a network.
using MakePlug = std::unique_ptr<Plug>(int size, bool one_machine);

// Opens the library, once per process. Throws base::Error that says what to install.
MakePlug& load_plugin();

}  // namespace lamina::transport::ucx
