// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/deadline.h"
#include "lamina/base/ids.h"
#include "lamina/transport/secret.h"
#include "lamina/transport/socket.h"

namespace lamina::transport {

struct Identity {
  base::Rank rank;
  int size = 0;
  Secret secret{};
  std::string generation;
};

// [Note: handshake] One connection from a higher rank to a lower one, over which both prove that they hold the job's
// secret:
//   connector: "LAMINA01" | from u32 | to u32 | nonce a     acceptor: nonce b | HMAC("accept"  | generation, ranks, a,
//   b) connector: HMAC("connect" | generation, ranks, a, b)    acceptor: "K"
// Never blocks: advance() does what the socket allows now. Any bytes from a stranger are safe.
class Handshake {
 public:
  enum class State { kRunning, kDone, kFailed };

  // `peer`: the rank to connect to; none accepts whoever proves to be a rank above ours.
  Handshake(const Identity& self, Fd socket, std::optional<base::Rank> peer, base::Deadline deadline);

  State advance();
  short events() const { return out_.empty() ? kRead : kWrite; }  // what poll() should wait for
  int fd() const { return socket_.get(); }
  const std::string& failure() const { return failure_; }

  bool connecting() const { return connecting_; }

  // Of a handshake that is done, or that connects.
  base::Rank peer() const { return *peer_; }
  Fd take() { return std::move(socket_); }

 private:
  static const short kRead, kWrite;
  State fail(std::string why);
  bool flush();              // true when nothing is left to write
  bool fill(std::size_t n);  // true when `in_` holds n bytes
  State receive();           // handles one whole message of the other side
  State greeted();           // acceptor: the first message came
  State answered();          // connector: the second message came
  std::string proof(const char* role) const;

  const Identity& self_;
  Fd socket_;
  std::optional<base::Rank> peer_;
  const bool connecting_;
  const base::Deadline deadline_;
  std::string nonce_a_, nonce_b_;
  std::string in_, out_;
  int step_ = 0;
  bool closed_ = false;
  std::string failure_;
};

// Connects this rank to every other over `listener` and `addresses` (of all ranks, as Address::text gives them), rank i
// to each j < i. Returns a socket per rank, none for our own. Strangers are closed and disturb nobody.
// `check_interrupt` is called every 200 ms and may throw. Throws base::TimeoutError that names the ranks missing at the
// deadline.
std::vector<Fd> connect_mesh(const Identity& self, Fd listener, const std::vector<std::string>& addresses,
                             base::Deadline deadline, const std::function<void()>& check_interrupt);

}  // namespace lamina::transport
