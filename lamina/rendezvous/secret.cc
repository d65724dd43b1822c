// SPDX-License-Identifier: Apache-2.0
#include "lamina/rendezvous/secret.h"

#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/params.h>
#include <poll.h>
#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <mutex>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/rendezvous/socket.h"
#include "lamina/value/bytes.h"

namespace lamina::rendezvous {
namespace {

[[noreturn]] void fail() { throw base::Error("OpenSSL cannot compute HMAC-SHA256 or SHA-256 here"); }

// By default OpenSSL takes itself away in an exit handler, before the handlers that were there when it was first used.
// Ours is among them, and signs to the other ranks that this one leaves. A machine's configuration of OpenSSL is for
// another library than this, which is a part of lamina's ([Note: own OpenSSL] in CMakeLists.txt).
void start_openssl() {
  static const bool started = OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT | OPENSSL_INIT_NO_LOAD_CONFIG, nullptr) == 1;
  if (!started) fail();
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
  const Fd fd(std::atoi(variable.c_str()));
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
    if (count < 0 && errno != EINTR) throw base::Error(base::str("no random numbers: ", system_error()));
    if (count > 0) done += static_cast<std::size_t>(count);
  }
  return secret;
}

Mac authenticate(const Secret& secret, std::string_view purpose, std::initializer_list<std::string_view> fields) {
  value::Writer text;
  text.put_block(purpose);
  for (const auto field : fields) text.put_block(field);
  return Signer(secret).sign(text.take());
}

bool same(const Mac& a, const Mac& b) {
  volatile std::uint8_t differs = 0;  // no compiler may end the loop early
  for (std::size_t i = 0; i < a.size(); ++i) differs = static_cast<std::uint8_t>(differs | (a[i] ^ b[i]));
  return differs == 0;
}

Digest digest(std::string_view bytes) {
  start_openssl();
  static EVP_MD* const sha = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  Digest result;
  unsigned length = 0;
  if (EVP_Digest(bytes.data(), bytes.size(), result.data(), &length, sha, nullptr) != 1) fail();
  return result;
}

void Signer::Free::operator()(evp_mac_ctx_st* context) const { EVP_MAC_CTX_free(context); }

Signer::Signer(const Secret& key) {
  start_openssl();
  static EVP_MAC* const hmac = EVP_MAC_fetch(nullptr, "HMAC", nullptr);
  char sha[] = "SHA256";
  const OSSL_PARAM parameters[] = {OSSL_PARAM_construct_utf8_string(OSSL_MAC_PARAM_DIGEST, sha, 0),
                                   OSSL_PARAM_construct_end()};
  context_.reset(hmac == nullptr ? nullptr : EVP_MAC_CTX_new(hmac));
  if (!context_ || EVP_MAC_init(context_.get(), key.data(), key.size(), parameters) != 1) fail();
}

Mac Signer::sign(std::string_view text) {
  Mac mac;
  std::size_t length = 0;
  const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
  const bool made = EVP_MAC_init(context_.get(), nullptr, 0, nullptr) == 1 &&
                    EVP_MAC_update(context_.get(), bytes, text.size()) == 1 &&
                    EVP_MAC_final(context_.get(), mac.data(), &length, mac.size()) == 1;
  if (!made) fail();
  return mac;
}

}  // namespace lamina::rendezvous
