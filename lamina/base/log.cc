// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/log.h"

#include <unistd.h>

#include <mutex>
#include <string>

#include "lamina/base/str.h"

namespace lamina::base {
namespace {

std::mutex mutex;
std::string name;  // guarded by mutex

void write_line(std::string_view level, std::string_view line) {
  std::lock_guard guard(mutex);
  const std::string text = str("[lamina", name.empty() ? "" : " ", name, "] ", level, line, "\n");
  // A single write keeps the line whole among the lines of other processes; a closed stderr is nobody's error.
  [[maybe_unused]] auto written = ::write(STDERR_FILENO, text.data(), text.size());
}

}  // namespace

void set_log_name(std::string_view value) {
  std::lock_guard guard(mutex);
  name = value;
}

void log_info(std::string_view line) { write_line("", line); }
void log_warning(std::string_view line) { write_line("warning: ", line); }

}  // namespace lamina::base
