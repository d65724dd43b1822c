// SPDX-License-Identifier: Apache-2.0
// The names of Gloo that torch's ProcessGroupGloo.hpp needs to be read, and no more. torch's package has that header and
// Gloo itself, inside its library, but not Gloo's headers. Nothing here is ever made, called or looked into by us: we
// only hold torch's group, which keeps Gloo behind pointers.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

namespace transport {
class Device;
class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = 0;
};
}  // namespace transport

namespace rendezvous {
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::vector<char>& value) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) = 0;
};
}  // namespace rendezvous

}  // namespace gloo
