// SPDX-License-Identifier: Apache-2.0
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <optional>

#include "lamina/archive/file_failure.h"
#include "lamina/archive/file_system.h"
#include "lamina/base/error.h"
#include "lamina/base/fd.h"
#include "lamina/base/output_file.h"
#include "lamina/base/str.h"

namespace lamina::archive {
namespace {

[[noreturn]] void fail(const char* doing, const Path& path, int code = errno, std::uint64_t needed = 0) {
  struct statvfs space{};
  const auto folder = path.has_parent_path() ? path.parent_path() : Path(".");
  const bool known = (code == ENOSPC || code == EDQUOT) && ::statvfs(folder.c_str(), &space) == 0;
  const std::optional free(std::uint64_t{space.f_bavail} * space.f_frsize);
  throw file_failure(doing, path, code, needed, known ? free : std::nullopt);
}

base::Fd opened(const Path& path, int flags, const char* doing) {
  int fd = -1;
  do {
    fd = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) fail(doing, path);
  return base::Fd(fd);
}

void sync(const base::Fd& fd, const Path& path) {
  while (::fsync(fd.get()) != 0) {
    if (errno != EINTR) fail("syncing", path);
  }
}

class PosixOutput : public FileSystem::Output {
 public:
  explicit PosixOutput(const Path& path) : path_(path), fd_(opened(path, O_WRONLY | O_CREAT | O_EXCL, "creating")) {}

  void write(std::span<const std::byte> bytes) override {
    while (!bytes.empty()) {
      const auto count = ::write(fd_.get(), bytes.data(), bytes.size());
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) fail("writing", path_, errno, bytes.size());
      bytes = bytes.subspan(static_cast<std::size_t>(count));
      size_ += count;
      if (size_ - sent_ >= kWindow) send();
    }
  }
  void sync() override { archive::sync(fd_, path_); }

 private:
  // Has the disk begin with what is here, and waits for the window before: so it works while the next one is made, and
  // sync() has little left, which nobody can interrupt.
  void send() {
    constexpr unsigned kWait = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    send(sent_, size_ - sent_, SYNC_FILE_RANGE_WRITE);
    if (sent_ > 0) send(sent_ - kWindow, kWindow, kWait);
    sent_ += kWindow;
  }
  void send(off_t begin, off_t size, unsigned how) const {
    if (::sync_file_range(fd_.get(), begin, size, how) == 0) return;
    // An error of the disk is told once, so here; some file systems do not know this call.
    if (errno == EIO || errno == ENOSPC || errno == EDQUOT) fail("writing", path_);
  }

  static constexpr off_t kWindow = off_t{32} << 20;
  const Path path_;
  const base::Fd fd_;
  off_t size_ = 0, sent_ = 0;
};

class PosixInput : public FileSystem::Input {
 public:
  explicit PosixInput(const Path& path) : path_(path), fd_(opened(path, O_RDONLY | O_NONBLOCK, "opening")) {
    struct stat status{};
    if (::fstat(fd_.get(), &status) != 0) fail("opening", path);
    if (!S_ISREG(status.st_mode)) throw base::FormatError(path.string() + ": no regular file");
    size_ = static_cast<std::uint64_t>(status.st_size);
  }

  std::uint64_t size() const override { return size_; }
  void read(std::uint64_t offset, std::span<std::byte> to) const override {
    while (!to.empty()) {
      const auto count = ::pread(fd_.get(), to.data(), to.size(), static_cast<off_t>(offset));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) fail("reading", path_);
      if (count == 0) {
        throw base::FormatError(base::str(path_.string(), ": ends at byte ", offset, ", ", to.size(), " too early"));
      }
      offset += static_cast<std::uint64_t>(count);
      to = to.subspan(static_cast<std::size_t>(count));
    }
  }

 private:
  const Path path_;
  const base::Fd fd_;
  std::uint64_t size_ = 0;
};

// A file that is locked, and gone with the lock.
class PosixLock : public FileSystem::Lock {
 public:
  PosixLock(Path path, base::Fd fd) : path_(std::move(path)), fd_(std::move(fd)) {}
  ~PosixLock() override { ::unlink(path_.c_str()); }

 private:
  const Path path_;
  const base::Fd fd_;
};

class PosixFileSystem : public FileSystem {
 public:
  std::unique_ptr<Output> create(const Path& path) override { return std::make_unique<PosixOutput>(path); }
  std::unique_ptr<Input> open(const Path& path) override { return std::make_unique<PosixInput>(path); }

  void make_folder(const Path& path) override {
    if (path.empty() || ::access(path.c_str(), F_OK) == 0) return;
    const auto parent = path.parent_path();
    if (parent != path) make_folder(parent);
    if (::mkdir(path.c_str(), 0777) != 0) {
      if (errno == EEXIST) return;  // another process was quicker
      fail("making the folder", path);
    }
    sync_folder(parent.empty() ? Path(".") : parent);
  }

  void make_new_folder(const Path& path) override {
    if (::mkdir(path.c_str(), 0777) != 0) fail("making the folder", path);
    sync_folder(path.has_parent_path() ? path.parent_path() : Path("."));
  }

  void rename(const Path& from, const Path& to) override {
    struct stat status{};
    if (::lstat(to.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) fail("renaming to", to, EEXIST);
    if (::rename(from.c_str(), to.c_str()) != 0) fail("renaming to", to);
  }

  bool exchange(const Path& one, const Path& other) override {
    if (::renameat2(AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), RENAME_EXCHANGE) == 0) return true;
    if (errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP) return false;
    fail("exchanging", other);
  }

  void sync_folder(const Path& path) override { archive::sync(opened(path, O_RDONLY | O_DIRECTORY, "opening"), path); }

  std::vector<Entry> list(const Path& folder) override {
    std::vector<Entry> entries;
    std::error_code error;
    std::filesystem::directory_iterator all(folder, error), end;
    for (; !error && all != end; all.increment(error)) {
      std::error_code unknown;
      const bool link = all->is_symlink(unknown);
      entries.push_back({all->path().filename().string(), !link && all->is_directory(unknown), link});
    }
    if (error && error != std::errc::no_such_file_or_directory) fail("listing", folder, error.value());
    std::ranges::sort(entries, {}, &Entry::name);
    return entries;
  }

  void remove(const Path& path) override {
    std::error_code error;
    std::filesystem::remove_all(path, error);
    if (error) fail("removing", path, error.value());
  }

  std::uint64_t free_bytes(const Path& path) override {
    struct statvfs space{};
    if (::statvfs(path.c_str(), &space) != 0) fail("asking for the space of", path);
    return static_cast<std::uint64_t>(space.f_bavail) * space.f_frsize;
  }

  std::unique_ptr<Lock> try_lock(const Path& path, const std::string& words, std::string* holder) override {
    while (true) {
      auto fd = base::open_output(path, O_RDWR);
      if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
        if (errno == EINTR) continue;
        if (errno != EWOULDBLOCK) fail("locking", path);
        char said[512];
        const auto count = ::pread(fd.get(), said, sizeof(said), 0);
        *holder = std::string(said, count > 0 ? static_cast<std::size_t>(count) : 0);
        return nullptr;
      }
      // The one who held it may have removed its name meanwhile.
      struct stat locked{}, named{};
      if (::fstat(fd.get(), &locked) != 0) fail("locking", path);
      if (::lstat(path.c_str(), &named) != 0 || named.st_ino != locked.st_ino) continue;
      // Words that do not fit on a full disk are missed, but the claim holds: a prune makes room there.
      const bool written =
          ::ftruncate(fd.get(), 0) == 0 && ::pwrite(fd.get(), words.data(), words.size(), 0) == std::ssize(words);
      if (!written) static_cast<void>(::ftruncate(fd.get(), 0));
      return std::make_unique<PosixLock>(path, std::move(fd));
    }
  }
};

}  // namespace

FileSystem& file_system() {
  static PosixFileSystem system;
  return system;
}

std::string read_all(FileSystem& files, const Path& path, std::uint64_t most) {
  const auto file = files.open(path);
  if (file->size() > most) {
    throw base::FormatError(
        base::str(path.string(), ": ", file->size(), " bytes, where at most ", most, " make sense"));
  }
  std::string text(file->size(), '\0');
  file->read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

void write_new(FileSystem& files, const Path& path, std::string_view text) {
  files.remove(path);
  const auto file = files.create(path);
  file->write(std::as_bytes(std::span(text)));
  file->sync();
}

}  // namespace lamina::archive
