// SPDX-License-Identifier: Apache-2.0
#include "lamina/shared_memory/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"

namespace lamina::shared_memory {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void fail(const char* doing, std::size_t bytes) {
  throw base::Error(base::str("cannot ", doing, " shared memory of ", bytes, " bytes: ", base::system_error()));
}

}  // namespace

Segment::Segment(std::size_t bytes) : fd_(::memfd_create("lamina", MFD_CLOEXEC | MFD_ALLOW_SEALING)), size_(bytes) {
  if (!fd_ || ::ftruncate(fd_.get(), static_cast<off_t>(bytes)) != 0) fail("make", bytes);
  if (::fcntl(fd_.get(), F_ADD_SEALS, kSeals) != 0) fail("seal", bytes);
  map();
}

Segment::Segment(base::Fd fd, std::size_t bytes) : fd_(std::move(fd)), size_(bytes) {
  struct stat status{};
  if (::fcntl(fd_.get(), F_GET_SEALS) != kSeals || ::fstat(fd_.get(), &status) != 0 ||
      static_cast<std::size_t>(status.st_size) < bytes) {
    throw base::Error(base::str("another process sent something else than a segment of ", bytes, " bytes"));
  }
  map();
  close_fd();
}

Segment::Segment(Segment&& other) noexcept
    : fd_(std::move(other.fd_)), size_(std::exchange(other.size_, 0)), data_(std::exchange(other.data_, nullptr)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(size_, other.size_);
  std::swap(data_, other.data_);
  return *this;
}

Segment::~Segment() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

void Segment::map() {
  void* mapped = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (mapped == MAP_FAILED) fail("map", size_);
  data_ = static_cast<std::byte*>(mapped);
  ::madvise(mapped, size_, MADV_DONTDUMP);
}

}  // namespace lamina::shared_memory
