// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/timeline_folder.h"

#include <stdlib.h>

#include <filesystem>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"
#include "lamina/observe/summary.h"
#include "lamina/observe/timeline_part.h"

namespace lamina::launch {

TimelineFolder::TimelineFolder(std::string file)
    : file_(std::filesystem::absolute(file).lexically_normal()), folder_(file_ + ".XXXXXX") {
  std::error_code ignored;  // mkdtemp() says the same
  std::filesystem::create_directories(std::filesystem::path(file_).parent_path(), ignored);
  const bool folder_given = std::filesystem::is_directory(file_, ignored);
  if (folder_given || ::mkdtemp(folder_.data()) == nullptr) {
    throw base::ConfigError(
        base::str("--timeline ", file, " cannot be written: ", folder_given ? "it is a folder" : base::system_error()));
  }
}

TimelineFolder::~TimelineFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

std::string TimelineFolder::variable() const { return base::str(observe::kPartsVariable, "=", folder_); }

std::string TimelineFolder::finish() const {
  observe::Timeline timeline = observe::read_parts(folder_);
  if (timeline.ranks.empty()) return "";
  observe::write_file(timeline, file_);
  return observe::describe(observe::summarise(timeline));
}

}  // namespace lamina::launch
