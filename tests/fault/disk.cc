// SPDX-License-Identifier: Apache-2.0
// A disk that fails, is slow, or is the last thing that a process sees: a library to preload, which stands between one
// rank, or all, and the system. LAMINA_TEST_DISK="RANK HOW AFTER FOLDER". RANK is -1 for all. HOW is the number of an
// error: writes to files below the folder meet it when this process has written AFTER bytes there. With 0, AFTER is how
// many KB it writes in a second; with -1, how many it reads. LAMINA_TEST_KILL="RANK CALL PATTERN": the rank is killed
// before its first call of that name for such a path.

#include <dlfcn.h>
#include <fnmatch.h>
#include <signal.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

struct Disk {
  int rank = -1, error = 0;
  long after = 0;
  char folder[1024] = "";
  bool is_there = false;
};

Disk disk_of_this_process() {
  Disk disk;
  const char* words = std::getenv("LAMINA_TEST_DISK");
  const char* rank = std::getenv("RANK");
  if (words == nullptr || rank == nullptr) return disk;
  const bool read = std::sscanf(words, "%d %d %ld %1023[^\n]", &disk.rank, &disk.error, &disk.after, disk.folder) == 4;
  disk.is_there = read && (disk.rank < 0 || disk.rank == std::atoi(rank));
  return disk;
}

std::string path_of(int fd) {
  char link[64], path[4096];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const auto size = ::readlink(link, path, sizeof path);
  return {path, size < 0 ? 0 : static_cast<size_t>(size)};
}

bool is_on(const Disk& disk, int fd) { return path_of(fd).starts_with(disk.folder); }

// Ends this process before a call, if it is to.
void reach(const char* call, const std::string& path) {
  const char* words = std::getenv("LAMINA_TEST_KILL");
  const char* rank = std::getenv("RANK");
  if (words == nullptr || rank == nullptr) return;
  int victim = -1;
  char fatal[32], pattern[256];
  if (std::sscanf(words, "%d %31s %255s", &victim, fatal, pattern) != 3 || victim != std::atoi(rank)) return;
  if (std::strcmp(call, fatal) == 0 && ::fnmatch(pattern, path.c_str(), 0) == 0) ::kill(::getpid(), SIGKILL);
}

// The system's own function of a name.
template <typename Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" int fsync(int fd) {
  static const auto sync_on = next<int(int)>("fsync");
  reach("fsync", path_of(fd));
  return sync_on(fd);
}

extern "C" int rename(const char* from, const char* to) noexcept {
  static const auto rename_on = next<int(const char*, const char*)>("rename");
  reach("rename", from);
  return rename_on(from, to);
}

extern "C" int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  static const auto rename_on = next<int(int, const char*, int, const char*, unsigned)>("renameat2");
  reach("renameat2", from);
  return rename_on(from_folder, from, to_folder, to, flags);
}

extern "C" int unlinkat(int folder, const char* name, int flags) noexcept {
  static const auto unlink_on = next<int(int, const char*, int)>("unlinkat");
  reach("unlinkat", path_of(folder) + "/" + name);
  return unlink_on(folder, name, flags);
}

extern "C" ssize_t write(int fd, const void* bytes, size_t count) {
  static const auto write_on = next<ssize_t(int, const void*, size_t)>("write");
  reach("write", path_of(fd));
  static std::atomic<long> written = 0;
  const auto disk = disk_of_this_process();  // each time: a process that starts ranks becomes them later
  if (!disk.is_there || !is_on(disk, fd)) return write_on(fd, bytes, count);
  if (disk.error == 0) {
    ::usleep(static_cast<useconds_t>(1000 * count / static_cast<size_t>(disk.after)));
  } else if (disk.error > 0 && written + static_cast<long>(count) > disk.after) {
    errno = disk.error;
    return -1;
  }
  written += static_cast<long>(count);
  return write_on(fd, bytes, count);
}

extern "C" ssize_t pread(int fd, void* bytes, size_t count, off_t offset) {
  static const auto pread_on = next<ssize_t(int, void*, size_t, off_t)>("pread");
  const auto disk = disk_of_this_process();
  if (disk.is_there && disk.error < 0 && is_on(disk, fd))
    ::usleep(static_cast<useconds_t>(1000 * count / static_cast<size_t>(disk.after)));
  return pread_on(fd, bytes, count, offset);
}

extern "C" ssize_t pread64(int fd, void* bytes, size_t count, off_t offset) { return pread(fd, bytes, count, offset); }
