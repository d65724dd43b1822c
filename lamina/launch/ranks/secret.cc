// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/secret.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>

#include "lamina/base/input_file.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"
#include "lamina/launch/ranks/error.h"

namespace lamina::launch {

Secret::Secret() {
  // Up to 256 bytes come whole.
  if (::getrandom(bytes_.data(), kBytes, 0) != kBytes) throw StartError("no random bytes: " + base::system_error());
}

Secret::Secret(const std::string& path) {
  const std::string before = base::str("--secret-file ", path, ": ");
  const base::Fd file = base::open_input(path, before);
  struct stat state{};
  ::fstat(file.get(), &state);
  if ((state.st_mode & 077) != 0) {
    throw base::ConfigError(base::str("--secret-file ", path, " may be read by others: chmod 600 ", path));
  }
  std::string text = base::read_input(file, before, kBytes);
  ::memcpy(bytes_.data(), text.data(), text.size());
  ::explicit_bzero(text.data(), text.size());
  if (text.size() != kBytes) {
    throw base::ConfigError(base::str("--secret-file ", path, " has less than ", kBytes,
                                      " bytes: make it by `head -c 32 /dev/urandom`, for all machines of the job"));
  }
}

Secret::~Secret() { ::explicit_bzero(bytes_.data(), kBytes); }

contact::Secret Secret::bytes() const {
  contact::Secret bytes;
  ::memcpy(bytes.data(), bytes_.data(), kBytes);
  return bytes;
}

base::Fd Secret::copy() const {
  base::Fd file(::memfd_create("lamina-secret", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file || ::pwrite(file.get(), bytes_.data(), kBytes, 0) != kBytes) {
    throw StartError("cannot hold the job's secret in memory: " + base::system_error());
  }
  ::fcntl(file.get(), F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL);
  return file;
}

}  // namespace lamina::launch
