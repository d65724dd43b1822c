// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace lamina::archive {

using Path = std::filesystem::path;

// A file system as checkpoints need it. All calls throw base::FileError, which names path and cause. The work of a call
// survives the end of the process. A power cut leaves only what was synced: a file's bytes by its own sync(), and
// names, rename() and exchange() by sync_folder() of the folder.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  class Output {
   public:
    virtual ~Output() = default;
    virtual void write(std::span<const std::byte> bytes) = 0;  // behind what was written before
    virtual void sync() = 0;
  };
  class Input {
   public:
    virtual ~Input() = default;
    virtual std::uint64_t size() const = 0;
    // Fills `to` with what lies at the offset. Thread-safe. base::FormatError where the file ends before.
    virtual void read(std::uint64_t offset, std::span<std::byte> to) const = 0;
  };
  // A claim that ends with the object, or with the process.
  class Lock {
   public:
    virtual ~Lock() = default;
  };
  struct Entry {
    std::string name;
    bool folder = false;
    bool link = false;  // a symbolic one, wherever it leads
  };

  virtual std::unique_ptr<Output> create(const Path& path) = 0;  // a new file; one that is there is an error
  virtual std::unique_ptr<Input> open(const Path& path) = 0;     // a regular file; of anything else an error
  virtual void make_folder(const Path& path) = 0;                // with its parents, for good; what is there is fine
  virtual void make_new_folder(const Path& path) = 0;            // for good; what is there, a link too, is an error
  virtual void rename(const Path& from, const Path& to) = 0;  // at once; a file there is replaced, a folder is an error
  virtual bool exchange(const Path& one, const Path& other) = 0;  // at once; false where the system cannot
  virtual void sync_folder(const Path& path) = 0;
  virtual std::vector<Entry> list(const Path& folder) = 0;  // by name; of one that is not there, empty
  virtual void remove(const Path& path) = 0;                // with all that is in it; what is not there is fine
  virtual std::uint64_t free_bytes(const Path& path) = 0;
  // nullptr where somebody else holds it; `holder` is then what that one said. A link, or a file of another user, is an
  // error and stays as it is.
  virtual std::unique_ptr<Lock> try_lock(const Path& path, const std::string& words, std::string* holder) = 0;
};

// The system's.
FileSystem& file_system();

// Reads a file of at most so many bytes. Throws base::FormatError where it is larger.
std::string read_all(FileSystem& files, const Path& path, std::uint64_t most);
// Makes a file anew; what has its name goes first. All is on the disk when this returns, but for its name in the
// folder.
void write_new(FileSystem& files, const Path& path, std::string_view text);

}  // namespace lamina::archive
