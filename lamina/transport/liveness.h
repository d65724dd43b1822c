// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/fd.h"
#include "lamina/base/ids.h"
#include "lamina/contact/handshake.h"
#include "lamina/transport/news.h"

namespace lamina::transport {

// Knows which peers live, from one plain socket to each. The kernel closes it the moment a process ends, however it
// ends, and gives up on a machine that does not answer for about ten seconds. Besides that only the few notes below are
// sent. Not thread-safe, but note() may be called from any thread.
class Liveness {
 public:
  enum class Kind : std::uint8_t {
    kGone = 0,           // the peer's process ended or its connection broke; the last thing heard of it
    kConnected = 'C',    // the sender, which has connected, knows our keys
    kReadable = 'R',     // the sender can read our memory
    kBye = 'B',          // the sender leaves on purpose and has sent us `value` messages and what else counts
    kAnswered = 'W',     // your kBye was read
    kArrived = 'A',      // all that your kBye counted has arrived
    kFlushed = 'F',      // the sender will touch none of our shared memory any more
    kInterrupted = 'I',  // the sender's process is about to end, since it was interrupted
    kNews = 'N',         // the sender tells of another rank: `value` is pack()'s
    kAlive = 'L',        // the sender's process does not stand still: see [Note: silence]
    kCountedLost = 'X',  // the sender has heard nothing for so long that it closes the connection
  };
  struct Note {
    base::Rank peer;
    Kind kind = Kind::kGone;
    std::uint64_t value = 0;
    std::string why;                         // kGone: a clause such as "its process ended"
    News::Fate fate = News::Fate::kPresent;  // kGone: the same as others are told it
  };

  explicit Liveness(int size);
  ~Liveness();
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;

  static std::uint64_t pack(const News::Word& word);
  // Nothing of what no rank of so many says.
  static std::optional<News::Word> unpack(std::uint64_t value, int size);

  // Takes the socket of a connection with `peer`; one that it had is given up. A forked child closes its copy, so that
  // its parent's death is noticed though the child lives on.
  void add(base::Rank peer, contact::Connection& connection);

  // Readable when poll() has something to tell.
  int fd() const { return events_.get(); }

  // Returns what the peers told since the last call. Does not block.
  std::vector<Note> poll();

  // Closes the connection.
  void forget(base::Rank peer);

  // Sends a note. One that cannot be sent is lost: the peer is then gone, which poll() tells.
  void note(base::Rank peer, Kind kind, std::uint64_t value = 0);

 private:
  struct Peer {
    base::Fd socket;
    std::optional<contact::Signer> outgoing, incoming;  // every note is signed, with its number
    std::uint64_t sent = 0, heard = 0;
    std::string unread;  // the beginning of a note
    std::string unsent;  // what the socket had no room for
  };
  bool read(base::Rank peer, std::vector<Note>& notes);  // false once the peer is gone
  void flush(base::Rank peer);
  void send_unsent(base::Rank peer);

  std::vector<Peer> peers_;
  std::mutex sending_;  // also whoever changes a socket
  base::Fd events_;
};

}  // namespace lamina::transport
