// SPDX-License-Identifier: Apache-2.0
#include "lamina/contact/secret.h"

#include <openssl/sha.h>
#include <poll.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <mutex>

#include "lamina/base/error.h"
#include "lamina/base/fd.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"
#include "lamina/base/whole_number.h"

namespace lamina::contact {
namespace {

// The hash after HMAC's first block: the key, filled up with zeros, each byte of it xor `pad`.
SHA256_CTX keyed(const Secret& key, std::uint8_t pad) {
  std::array<std::uint8_t, SHA256_CBLOCK> block{};
  std::ranges::copy(key, block.begin());
  for (auto& byte : block) byte ^= pad;
  SHA256_CTX context;
  SHA256_Init(&context);
  SHA256_Update(&context, block.data(), block.size());
  return context;
}

Digest finish(SHA256_CTX context, const void* bytes, std::size_t size) {
  SHA256_Update(&context, bytes, size);
  Digest result;
  SHA256_Final(result.data(), &context);
  return result;
}

// Bytes read into `to` at `done`; 0 at the end of the file. A pipe whose writer is slow gets ten seconds.
ssize_t read_some(int fd, Secret& to, std::size_t done) {
  const ssize_t at_offset = ::pread(fd, to.data() + done, to.size() - done, static_cast<off_t>(done));
  if (at_offset >= 0 || errno != ESPIPE) return at_offset;
  pollfd ready{fd, POLLIN, 0};
  if (::poll(&ready, 1, 10000) == 0) return 0;
  return ::read(fd, to.data() + done, to.size() - done);
}

Secret read_secret(const std::string& variable) {
  const base::Fd fd(base::whole_number(variable).value_or(-1));
  Secret secret;
  std::size_t done = 0;
  while (done < secret.size()) {
    const ssize_t count = read_some(fd.get(), secret, done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      throw base::ConfigError(
          base::str(environment::kSecretVariable, "=", variable, " gave ", done, " of ", secret.size(),
                    " bytes: it is for the launcher (`lamina run`) to set; unset it"),
          base::Code{"start-secret-descriptor"});
    }
    done += static_cast<std::size_t>(count);
  }
  return secret;
}

}  // namespace

std::optional<Secret> inherited_secret() {
  static std::mutex mutex;
  static std::optional<Secret> kept;
  std::lock_guard guard(mutex);
  if (const char* variable = std::getenv(environment::kSecretVariable)) {
    kept = read_secret(variable);
    ::unsetenv(environment::kSecretVariable);  // the number means nothing any more, here or in a child
  }
  return kept;
}

Secret random_secret() {
  Secret secret;
  std::size_t done = 0;
  while (done < secret.size()) {
    const ssize_t count = ::getrandom(secret.data() + done, secret.size() - done, 0);
    if (count < 0 && errno != EINTR) throw base::Error(base::str("no random numbers: ", base::system_error()));
    if (count > 0) done += static_cast<std::size_t>(count);
  }
  return secret;
}

Mac authenticate(const Secret& secret, std::string_view purpose, std::initializer_list<std::string_view> fields) {
  std::string text;
  const auto put = [&](std::string_view field) {
    const std::uint64_t size = field.size();
    text.append(reinterpret_cast<const char*>(&size), sizeof size).append(field);
  };
  put(purpose);
  for (const auto field : fields) put(field);
  return Signer(secret).sign(text);
}

bool same(const Mac& a, const Mac& b) {
  volatile std::uint8_t differs = 0;  // no compiler may end the loop early
  for (std::size_t i = 0; i < a.size(); ++i) differs = static_cast<std::uint8_t>(differs | (a[i] ^ b[i]));
  return differs == 0;
}

Digest digest(std::string_view bytes) {
  SHA256_CTX context;
  SHA256_Init(&context);
  return finish(context, bytes.data(), bytes.size());
}

struct Signer::FirstBlocks {
  SHA256_CTX inner, outer;
};

Signer::Signer(const Secret& key)
    : hashed_(std::make_shared<FirstBlocks>(FirstBlocks{keyed(key, 0x36), keyed(key, 0x5c)})) {}

Mac Signer::sign(std::string_view text) const {
  const Digest inner = finish(hashed_->inner, text.data(), text.size());
  return finish(hashed_->outer, inner.data(), inner.size());
}

}  // namespace lamina::contact
