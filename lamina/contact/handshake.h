// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/deadline.h"
#include "lamina/base/fd.h"
#include "lamina/base/ids.h"
#include "lamina/contact/secret.h"

namespace lamina::contact {

struct Identity {
  base::Rank rank;
  int size = 0;
  Secret secret{};
  std::string generation;
  std::vector<std::string> told;  // by rank: what it shall know of us (where to send to us)
};

// The result of a handshake: a socket, whose peer has proven that it holds the secret, the keys of the two directions,
// and the words of the peer. The keys are new, and end with the connection.
struct Connection {
  base::Fd socket;
  Secret outgoing{}, incoming{};
  std::string told;
  bool accepted = false;  // we can be before the peer in knowing of it
};

// [Note: handshake] One connection from a higher rank to a lower one, over which both prove that they hold the job's
// secret:
//   connector: "LAMINA02" | from u32 | to u32 | nonce a
//   acceptor:  nonce b | MAC(secret, "accept" | what both know)
//   connector: MAC(secret, "connect" | what both know) | sealed: what it tells
//   acceptor:  sealed: what it tells
// Both know the generation, the ranks and the nonces; the key of a direction is MAC(secret, "key" | the same). Sealed
// is length u32 | MAC(key, "told" | text) | text. Each end has drawn a nonce, so that nothing of it can be used again.
// Never blocks: advance() does what the socket allows now. Any bytes from a stranger are safe.
class Handshake {
 public:
  enum class State { kRunning, kDone, kFailed, kKnocked };

  // `peer`: the rank to connect to; none accepts whoever proves to be a rank above ours. One below ours can only knock
  // ([Note: knocks]), whoever that is.
  Handshake(const Identity& self, base::Fd socket, std::optional<base::Rank> peer, base::Deadline deadline);

  State advance();
  short events() const { return out_.empty() ? kRead : kWrite; }  // what poll() should wait for
  int fd() const { return socket_.get(); }
  const std::string& failure() const { return failure_; }

  bool connecting() const { return connecting_; }
  bool has_closed() const { return closed_; }    // it has failed, since the connection closed
  bool was_refused() const { return refused_; }  // or since nothing listens there

  // For a handshake that is done, that connects, or that is a knock.
  base::Rank peer() const { return *peer_; }
  Connection take();

 private:
  static const short kRead, kWrite;
  State fail(std::string why);
  bool flush();                // true when nothing is left to write
  bool fill(std::size_t n);    // true when `in_` holds n bytes
  std::size_t wanted() const;  // how long the part is that comes next
  State receive();             // handles one whole part of the other side's messages
  State greeted();             // acceptor: the greeting came
  State answered();            // connector: the answer came
  State proven();              // acceptor: the connector's proof came
  State opened();              // the text of what is sealed came
  base::Rank from() const { return connecting_ ? self_.rank : *peer_; }
  base::Rank to() const { return connecting_ ? *peer_ : self_.rank; }
  std::string prove(const char* purpose) const;
  Secret key(base::Rank sender) const;
  std::string seal() const;

  const Identity& self_;
  base::Fd socket_;
  std::optional<base::Rank> peer_;
  const bool connecting_;
  const base::Deadline deadline_;
  std::string nonce_a_, nonce_b_;
  std::string in_, out_;
  enum class Awaited { kGreeting, kAnswer, kProof, kSealSize, kSealed, kNothing } awaited_;
  std::uint32_t sealed_size_ = 0;
  std::string seal_, told_;
  bool closed_ = false, refused_ = false;
  std::string failure_;
};

// Advances one that connects, whenever its socket is ready, until it is done or has failed. `check_interrupt` may be
// empty.
Handshake::State finish(Handshake& handshake, const std::function<void()>& check_interrupt);

}  // namespace lamina::contact
