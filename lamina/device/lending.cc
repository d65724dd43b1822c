// SPDX-License-Identifier: Apache-2.0
#include "lamina/device/lending.h"

#include <atomic>
#include <utility>

namespace lamina::devices {
namespace {

struct Lent {
  at::DeviceType type;
  Lending how;
};

std::atomic<const Lent*> said = nullptr;  // by lend(); kept for good

}  // namespace

std::optional<Lending> lending_of(at::Device device) {
  if (device.type() == at::kCUDA)
    return Lending{"cuda", [](const void* address) { return const_cast<void*>(address); }};
  const auto* const other = said.load();
  return other != nullptr && other->type == device.type() ? std::optional(other->how) : std::nullopt;
}

void lend(at::DeviceType type, Lending how) { said = new Lent{type, std::move(how)}; }

}  // namespace lamina::devices
