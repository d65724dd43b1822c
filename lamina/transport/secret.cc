// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/secret.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <poll.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <mutex>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/transport/socket.h"

namespace lamina::transport {
namespace {

// Bytes read into `to` at `done`; 0 at the end of the file. A pipe whose writer is slow gets ten seconds.
ssize_t read_some(int fd, Secret& to, std::size_t done) {
  const ssize_t at_offset = ::pread(fd, to.data() + done, to.size() - done, static_cast<off_t>(done));
  if (at_offset >= 0 || errno != ESPIPE) return at_offset;
  pollfd ready{fd, POLLIN, 0};
  if (::poll(&ready, 1, 10000) == 0) return 0;
  return ::read(fd, to.data() + done, to.size() - done);
}

Secret read_secret(const std::string& variable) {
  const Fd fd(std::atoi(variable.c_str()));
  Secret secret;
  std::size_t done = 0;
  while (done < secret.size()) {
    const ssize_t count = read_some(fd.get(), secret, done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      throw base::ConfigError(base::str(base::kSecretVariable, "=", variable, " gave ", done, " of ", secret.size(),
                                        " bytes: it is for the launcher (`lamina run`) to set; unset it"));
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
  if (const char* variable = std::getenv(base::kSecretVariable)) {
    kept = read_secret(variable);
    ::unsetenv(base::kSecretVariable);  // the number means nothing any more, here or in a child
  }
  return kept;
}

Secret random_secret() {
  Secret secret;
  std::size_t done = 0;
  while (done < secret.size()) {
    const ssize_t count = ::getrandom(secret.data() + done, secret.size() - done, 0);
    if (count < 0 && errno != EINTR) throw base::Error(base::str("no random numbers: ", system_error()));
    if (count > 0) done += static_cast<std::size_t>(count);
  }
  return secret;
}

Mac authenticate(const Secret& secret, std::string_view text) {
  Mac mac;
  unsigned length = mac.size();
  const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
  if (!HMAC(EVP_sha256(), secret.data(), secret.size(), bytes, text.size(), mac.data(), &length)) {
    throw base::Error("OpenSSL cannot compute HMAC-SHA256 here");
  }
  return mac;
}

bool same(const Mac& a, const Mac& b) { return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0; }
bool same(const Token& a, const Token& b) { return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0; }

Token pair_token(const Secret& secret, std::string_view generation, base::Rank from, base::Rank to) {
  const Mac mac = authenticate(secret, base::str("frame|", generation, "|", from, "|", to));
  Token token;
  std::copy_n(mac.begin(), token.size(), token.begin());
  return token;
}

}  // namespace lamina::transport
