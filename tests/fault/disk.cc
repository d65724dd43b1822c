// SPDX-License-Identifier: Apache-2.0
// A disk that fails or is slow: a library to preload, which answers the writes of one rank, or of all, for the system.
// LAMINA_TEST_DISK="RANK HOW AFTER FOLDER": RANK is -1 for all; HOW is the number of an error, which writes to files
// below the folder meet when this process has written AFTER bytes there, or 0: then AFTER is how many MB it writes in a
// second.

#include <dlfcn.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

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

bool is_on(const Disk& disk, int fd) {
  char link[64], path[4096];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const auto size = ::readlink(link, path, sizeof path - 1);
  if (size < 0) return false;
  path[size] = '\0';
  return std::strncmp(path, disk.folder, std::strlen(disk.folder)) == 0;
}

}  // namespace

extern "C" ssize_t write(int fd, const void* bytes, size_t count) {
  using Write = ssize_t (*)(int, const void*, size_t);
  static const auto write_on = reinterpret_cast<Write>(::dlsym(RTLD_NEXT, "write"));
  static std::atomic<long> written = 0;
  const auto disk = disk_of_this_process();  // each time: a process that starts ranks becomes them later
  if (!disk.is_there || !is_on(disk, fd)) return write_on(fd, bytes, count);
  if (disk.error == 0) {
    ::usleep(static_cast<useconds_t>(count / static_cast<size_t>(disk.after)));
  } else if (written + static_cast<long>(count) > disk.after) {
    errno = disk.error;
    return -1;
  }
  written += static_cast<long>(count);
  return write_on(fd, bytes, count);
}
