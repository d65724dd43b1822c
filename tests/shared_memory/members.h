// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "lamina/shared_memory/communicator.h"

namespace lamina::shared_memory {

// A board for members that are threads of one process.
class LocalBoard : public Board {
 public:
  void put(const std::string& key, const std::string& word) override;
  std::string get(const std::string& key, const std::function<void()>& check = [] {}) override;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> words_;
};

// One for members that are processes: a folder with a file for each word.
class FileBoard : public Board {
 public:
  explicit FileBoard(std::string folder) : folder_(std::move(folder)) {}
  void put(const std::string& key, const std::string& word) override;
  std::string get(const std::string& key, const std::function<void()>& check) override;

 private:
  std::string path(const std::string& key) const;
  const std::string folder_;
};

inline const Check kPatient = [](const std::string& /*awaited*/) {};

// Runs `work` on each of so many members, threads that are one another's neighbours, and returns what each ended with:
// "" or its error's type and text, "DesyncError: ...". `readings`: of each member; none: as by default.
using Work = std::function<void(Communicator& group, int rank)>;
std::vector<std::string> together(int members, const Work& work, const std::vector<Reading>& readings = {});

// "member 0 of 3", ...
std::vector<std::string> names(int members);

// The error that `call` throws, the same way; "" for none.
std::string error_of(const std::function<void()>& call);

template <class T>
Buffer buffer_of(std::vector<T>& elements, layout::DType dtype) {
  return {reinterpret_cast<std::byte*>(elements.data()), elements.size(), dtype};
}

}  // namespace lamina::shared_memory
