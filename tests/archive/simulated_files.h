// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "lamina/archive/file_system.h"

namespace lamina::archive::testing {

// The end of the process at an operation. No std::exception, so that nothing takes it for an error that it knows.
struct Killed {};

// A file system in memory, which keeps what was synced apart from what was not. Operations that change something, or
// sync, are counted; each may be the last one of the process, or fail. As in reality
//   - a killed process leaves all that it did, a write also by halves, and its locks are free;
//   - a power cut loses what was not synced: of a file some of its last bytes, of a folder its last operations. Each
//     folder goes back on its own, so what was removed in one may stay removed where the removal of that one is undone.
class SimulatedFiles : public FileSystem {
 public:
  explicit SimulatedFiles(bool exchanges = true);  // false: a system without exchange()

  // The process ends at the operation of this number, counted from 0 and from now: it throws Killed, and so do all
  // after it, but those in destructors, which do nothing.
  void kill_at(std::uint64_t number);
  // Operations fail from this number on, as a disk does that is full (ENOSPC, EDQUOT: files can still be removed), that
  // became read-only (EROFS: all) or, once only, that failed (EIO).
  void fail_at(std::uint64_t number, int code);
  std::uint64_t operations() const { return operations_; }  // since one of these two calls

  void restart();                        // as another process
  void cut_power(std::uint64_t random);  // and restart; what is lost depends on the number

  // Calls it before each operation, as what another process does just then.
  void interfere(std::function<void(std::uint64_t)> with) { interferes_ = std::move(with); }

  std::unique_ptr<Output> create(const Path& path) override;
  std::unique_ptr<Input> open(const Path& path) override;
  void make_folder(const Path& path) override;
  void make_new_folder(const Path& path) override;
  void rename(const Path& from, const Path& to) override;
  bool exchange(const Path& one, const Path& other) override;
  void sync_folder(const Path& path) override;
  std::vector<Entry> list(const Path& folder) override;
  void remove(const Path& path) override;
  std::uint64_t free_bytes(const Path& path) override { return 0; }
  std::unique_ptr<Lock> try_lock(const Path& path, const std::string& words, std::string* holder) override;

 private:
  struct Node;
  class SimulatedOutput;
  class SimulatedInput;
  class SimulatedLock;
  using Entries = std::map<std::string, std::shared_ptr<Node>>;
  struct Node {
    bool folder = false;
    std::vector<std::byte> bytes;
    std::size_t synced = 0;  // bytes
    Entries entries;
    std::vector<Entries> since;  // what the folder was after each operation since its last sync, and at that
  };

  std::shared_ptr<Node> find(const Path& path) const;  // nullptr where there is none
  std::shared_ptr<Node> parent_of(const char* doing, const Path& path) const;
  void change(const std::shared_ptr<Node>& folder, const std::function<void(Entries&)>& how);
  void remove_tree(const Path& path, const std::shared_ptr<Node>& node);
  void lose(Node& node, std::mt19937_64& random);
  // Counts one operation; throws when it is the last one, or to fail.
  void operation(const char* doing, const Path& path, std::uint64_t bytes = 0);

  const bool exchanges_;
  std::shared_ptr<Node> root_ = std::make_shared<Node>(Node{.folder = true});
  std::uint64_t operations_ = 0, kill_at_ = ~0ULL, fail_at_ = ~0ULL;
  int code_ = 0;
  bool dead_ = false;
  std::map<Path, std::string> locks_;  // and what their holders said
  std::uint64_t process_ = 0;
  std::function<void(std::uint64_t)> interferes_;
};

}  // namespace lamina::archive::testing
