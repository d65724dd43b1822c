// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "lamina/archive/file_system.h"

namespace lamina::archive {

// A folder that appears whole, or not at all: it is written beside its place. Without a commit nothing of it stays;
// what a killed process leaves, the next one with the same place removes.
class FreshFolder {
 public:
  // Throws base::UsageError where the place is taken, or another process writes it.
  FreshFolder(FileSystem& files, Path place);
  ~FreshFolder();
  FreshFolder(const FreshFolder&) = delete;

  const Path& path() const { return path_; }  // where files go, which writers sync
  void commit();

 private:
  FileSystem& files_;
  const Path place_, path_;
  std::unique_ptr<FileSystem::Lock> lock_;
  bool written_ = false;
};

}  // namespace lamina::archive
