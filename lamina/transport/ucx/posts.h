// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "lamina/transport/transfer.h"
#include "lamina/transport/ucx/receiver.h"

namespace lamina::transport::ucx {

// One end of a put. UCX holds it, too, while it reads or writes the memory: one that is given up lives until then.
struct Passage {
  base::Rank peer;
  Parcel parcel;
  std::condition_variable& changed;  // told when it has ended
  int missing = 1;                   // what has yet to happen; of a put: it was read, and its end was told
  ucs_status_t status = UCS_OK;
  std::exception_ptr error;
  std::string header;  // of a put: UCX reads it until the put is sent

  bool ended() const { return missing == 0; }
  void step_done(ucs_status_t with);
  void fail(std::exception_ptr with);
};

// The receiving ends of puts. Nothing of one that its sender has not signed is looked at, stored or answered, and what
// came before is dropped. Every call is made by one thread at a time, as the worker's.
class Posts {
 public:
  // Told to the sender: how its put ended and, where it differs, what was posted.
  struct End {
    base::Rank to;
    std::uint64_t sequence;
    PutOutcome answer;
    ParcelEnd posted;
  };

  Posts(Worker& worker, Receiver& receiver, base::Rank self, int size);

  void add(const std::shared_ptr<Passage>& passage);
  void give_up(Passage& passage);
  // Ends of puts; the caller takes them out.
  std::deque<End>& ends() { return ends_; }

  // How many puts of `from` have come so far.
  std::uint64_t received(base::Rank from) const { return peers_[from.value].count; }
  // Lets go of puts that have no post, and of those that come from now on.
  void close();

 private:
  struct Arrival {
    PieceHeader header;
    std::string name, meaning;
    const void* bytes;   // as long as UCX's call lasts; nullptr: they are kept, or
    void* announcement;  // UCX's descriptor of bytes that are not here yet
    std::string kept;

    base::Rank from() const { return base::Rank(header.from); }
  };
  struct Peer {
    std::uint64_t count = 0, next = 0;                       // all before the next have come
    std::set<std::uint64_t> ahead;                           // and some behind it
    std::map<std::string, Arrival> early;                    // puts without a post
    std::map<std::string, std::shared_ptr<Passage>> posted;  // posts without a put
    std::set<std::string> given_up;                          // posts whose puts have not come
  };
  struct Receiving;

  static ucs_status_t arrived(void* self, const void* header, size_t header_size, void* data, size_t size,
                              const ucp_am_recv_param_t* param);
  static void finished(void* request, ucs_status_t status, size_t size, void* receiving);

  bool is_new(const PieceHeader& header);
  // True where UCX's descriptor is in use or kept.
  bool take(Arrival arrival);
  bool receive(const Arrival& arrival, const std::shared_ptr<Passage>& passage);
  void received(const PieceHeader& header, Passage& passage, ucs_status_t status);
  void end(const Arrival& arrival, PutOutcome answer, const ParcelEnd& posted = {});
  void release(const Arrival& arrival);

  Worker& worker_;
  Receiver& receiver_;
  const base::Rank self_;
  std::vector<Peer> peers_;
  std::deque<End> ends_;
  bool closed_ = false;
};

}  // namespace lamina::transport::ucx
