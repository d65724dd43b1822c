// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/log.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <mutex>
#include <string>
#include <string_view>

#include "lamina/base/coded.h"
#include "lamina/base/printable.h"
#include "lamina/base/str.h"

namespace lamina::base {
namespace {

std::mutex mutex;
std::string name;  // guarded by mutex

constexpr std::array kLevels = {"error", "warning", "info", "debug"};

// A single write keeps the line whole among the lines of other processes; a closed stderr is nobody's error.
void write_whole(const std::string& text) {
  [[maybe_unused]] auto written = ::write(STDERR_FILENO, text.data(), text.size());
}

void write_warning(std::string_view line) {
  std::lock_guard guard(mutex);
  write_whole(str("[lamina", name.empty() ? "" : " ", name, "] warning: ", printable(without_hints(line)), "\n"));
}

Level level_of_environment() {
  const char* word = std::getenv("LAMINA_LOG");
  if (word == nullptr || *word == '\0') return Level::kInfo;
  const auto found = std::ranges::find(kLevels, std::string_view(word));
  if (found != kLevels.end()) return static_cast<Level>(found - kLevels.begin());
  write_warning(str("LAMINA_LOG is ", word, ", which is none of error, warning, info and debug: info is taken"));
  return Level::kInfo;
}

}  // namespace

bool says(Level level) {
  static const Level most = level_of_environment();
  return level <= most;
}

void set_log_name(std::string_view value) {
  std::lock_guard guard(mutex);
  name = value;
}

void log_warning(std::string_view line) {
  if (says(Level::kWarning)) write_warning(line);
}

void log_info(std::string_view line) {
  if (says(Level::kInfo)) write_whole(str("lamina: ", printable(line), "\n"));
}

}  // namespace lamina::base
