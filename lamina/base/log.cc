// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/log.h"

#include <unistd.h>

#include <mutex>
#include <string>

#include "lamina/base/printable.h"
#include "lamina/base/str.h"

namespace lamina::base {
namespace {

std::mutex mutex;
std::string name;  // guarded by mutex

}  // namespace

void set_log_name(std::string_view value) {
  std::lock_guard guard(mutex);
  name = value;
}

void log_warning(std::string_view line) {
  std::lock_guard guard(mutex);
  const std::string text = str("[lamina", name.empty() ? "" : " ", name, "] warning: ", printable(line), "\n");
  // A single write keeps the line whole among the lines of other processes; a closed stderr is nobody's error.
  [[maybe_unused]] auto written = ::write(STDERR_FILENO, text.data(), text.size());
}

}  // namespace lamina::base
