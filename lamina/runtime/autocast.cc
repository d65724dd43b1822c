// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/autocast.h"

#include <ATen/autocast_mode.h>

#include "lamina/base/error.h"

namespace lamina::runtime {
namespace {

namespace autocast = at::autocast;

constexpr auto kOff = static_cast<char>(-1);
constexpr const auto& kDevices = autocast::_AUTOCAST_SUPPORTED_DEVICES;

void apply(std::string_view captured) {
  for (std::size_t i = 0; i < kDevices.size(); ++i) {
    const bool on = captured[i] != kOff;
    if (on) autocast::set_autocast_dtype(kDevices[i], static_cast<at::ScalarType>(captured[i]));
    if (on != autocast::is_autocast_enabled(kDevices[i])) autocast::set_autocast_enabled(kDevices[i], on);
  }
}

// As torch's context managers do: what was cast is forgotten at the end of the outermost, lest the next step, with
// other weights, finds it.
class Nested {
 public:
  Nested() { autocast::increment_nesting(); }
  ~Nested() {
    if (autocast::decrement_nesting() == 0) forget_casts();
  }
  Nested(const Nested&) = delete;
  Nested& operator=(const Nested&) = delete;
};

class Restored {
 public:
  Restored() : before_(capture_autocast()), keeps_casts_(autocast::is_autocast_cache_enabled()) {
    for (std::size_t i = 0; i < kDevices.size(); ++i) dtypes_[i] = autocast::get_autocast_dtype(kDevices[i]);
  }
  ~Restored() {
    autocast::set_autocast_cache_enabled(keeps_casts_);
    for (std::size_t i = 0; i < kDevices.size(); ++i) autocast::set_autocast_dtype(kDevices[i], dtypes_[i]);
    apply(before_);
  }
  Restored(const Restored&) = delete;
  Restored& operator=(const Restored&) = delete;

 private:
  const std::string before_;
  const bool keeps_casts_;
  std::array<at::ScalarType, kDevices.size()> dtypes_;
};

}  // namespace

std::string capture_autocast() {
  std::string captured;
  for (const auto device : kDevices) {
    const bool on = autocast::is_autocast_enabled(device);
    captured += on ? static_cast<char>(autocast::get_autocast_dtype(device)) : kOff;
  }
  return captured;
}

void forget_casts() { autocast::clear_cache(); }

void run_with_autocast(std::string_view captured, const std::function<void()>& work) {
  if (captured.size() != kDevices.size()) throw base::FormatError("a call's autocast is malformed");
  for (const char dtype : captured) {
    if (dtype != kOff && (dtype < 0 || dtype >= static_cast<char>(at::ScalarType::NumOptions))) {
      throw base::FormatError("a call's autocast names no dtype");
    }
  }
  if (captured == capture_autocast() && !autocast::is_autocast_cache_enabled()) return work();
  const Restored restored;
  const Nested nested;
  apply(captured);
  autocast::set_autocast_cache_enabled(false);
  work();
}

}  // namespace lamina::runtime
