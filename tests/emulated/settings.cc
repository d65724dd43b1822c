// SPDX-License-Identifier: Apache-2.0
#include "tests/emulated/settings.h"

#include <cstdlib>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>

namespace emulated {
namespace {

[[noreturn]] void refuse(const char* name, const std::string& value, const std::string& wanted) {
  throw std::invalid_argument(std::string(name) + "=" + value + ": " + wanted);
}

unsigned long number(const char* name, unsigned long otherwise, unsigned long least, unsigned long most) {
  const char* given = std::getenv(name);
  if (given == nullptr || *given == '\0') {
    return otherwise;
  }
  char* end = nullptr;
  const auto value = std::strtoul(given, &end, 10);
  if (*end != '\0' || *given == '-' || value < least || value > most) {
    refuse(name, given, "a number of " + std::to_string(least) + " to " + std::to_string(most));
  }
  return value;
}

Settings read() {
  constexpr auto kAny = std::numeric_limits<unsigned long>::max();
  Settings made;
  made.devices = static_cast<int>(number("EMULATED_DEVICES", 4, 1, kMostDevices));
  made.delay_us = static_cast<long>(number("EMULATED_DELAY_US", 0, 0, 10'000'000));
  made.seed = number("EMULATED_SEED", 0, 0, kAny);
  made.memory = number("EMULATED_MEMORY", made.memory, 1, kAny);
  const char* ignored = std::getenv("EMULATED_IGNORE");
  std::istringstream words(ignored != nullptr ? ignored : "");
  for (std::string word; std::getline(words, word, ',');) {
    if (word == "waits") {
      made.ignores_waits = true;
    } else if (word == "record_stream") {
      made.ignores_record_stream = true;
    } else {
      refuse("EMULATED_IGNORE", ignored, "\"waits\", \"record_stream\" or both with a comma between");
    }
  }
  return made;
}

}  // namespace

const Settings& settings() {
  static const Settings read_once = read();
  return read_once;
}

}  // namespace emulated
