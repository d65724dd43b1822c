// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lamina/device/copies.h"
#include "lamina/transport/ucx/lent_memory.h"
#include "lamina/transport/ucx/wire.h"
#include "lamina/transport/ucx/worker.h"

namespace lamina::transport::ucx {

// Puts the pieces that arrive together to messages, and the messages of each sender in order. Nothing of a piece that
// its sender has not signed is looked at, stored or answered. What came before, or is not what was signed, is dropped
// and the true piece awaited; a message that is genuine but malformed is skipped. All are counted, and told of at most
// every ten seconds. Every call is made by one thread at a time, as the worker's.
class Receiver {
 public:
  struct Received {
    base::Rank from;
    std::string head;
    std::vector<at::Tensor> buffers;  // private memory
  };

  // The large buffers of one message that lie in the sender's memory.
  struct Offer {
    base::Rank from;
    std::uint64_t sequence;
    struct Part {
      void* to;
      std::uint64_t address;
      std::size_t size;
    };
    std::vector<Part> parts;
  };

  Receiver(Worker& worker, const LentMemory& lent, int size);

  // Pieces of `from` are signed by that key. Our own rank, which sends itself nothing over UCX, has none.
  int size() const { return static_cast<int>(peers_.size()); }
  void admit(base::Rank from, const contact::Secret& key) { peers_[from.value].key.emplace(key); }

  // Moves on with what the worker's last progress() brought.
  void take_arrivals();
  // True while a piece waits until memory of the device may be written.
  bool awaits_device() const { return !deferred_.empty(); }

  // Complete messages, in order for each sender. The caller takes them out.
  std::deque<Received>& ready() { return ready_; }

  // The parts to copy, in order. The caller takes an offer out, copies its parts, without the lock if it likes, and
  // reports.
  std::deque<Offer>& offers() { return offers_; }
  void copied(const Offer& offer, bool all);

  // True where `header` is signed by its sender, for an active message of that id.
  bool genuine(const PieceHeader& header, unsigned id);

  // How many messages of `from` were ready, or skipped, so far.
  std::uint64_t received(base::Rank from) const { return peers_[from.value].next; }
  std::int64_t dropped() const { return dropped_; }
  void drop(base::Rank from, const std::string& why);

 private:
  struct Arrival {
    PieceHeader header;
    void* data;  // the piece itself, or where it is not here yet UCX's descriptor of it
    std::size_t size;
    bool here;
  };
  struct Assembly {
    std::string head;
    bool head_here = false;
    bool skipped = false;
    std::vector<at::Tensor> buffers;
    std::vector<bool> expected;                       // per buffer: it has yet to be announced
    std::map<std::size_t, devices::LentBytes> rooms;  // by buffer: those on the device
    int missing = 1;                                  // pieces that have yet to be received, the packet included
    int receiving = 0;                                // of these, the ones being written now
    std::vector<Arrival> waiting;                     // buffers announced before the packet was here
  };
  struct Peer {
    std::optional<contact::Signer> key;
    std::uint64_t next = 0;  // sequence of the next message to become ready
    std::map<std::uint64_t, Assembly> open;
  };
  struct Receiving;

  static ucs_status_t arrived(void* self, const void* header, size_t header_size, void* data, size_t size,
                              const ucp_am_recv_param_t* param);
  static void finished(void* request, ucs_status_t status, size_t size, void* receiving);

  void take(const Arrival& arrival);
  void receive(const Arrival& arrival, Assembly& assembly, void* to, ucs_memory_type_t type = UCS_MEMORY_TYPE_HOST);
  void received_piece(const PieceHeader& header, ucs_status_t status);
  void open_packet(const PieceHeader& header, Assembly& assembly);
  void make_room(const PieceHeader& header, Assembly& assembly, const std::vector<BufferSpec>& specs);
  std::set<std::uint32_t> lent_buffers(const PieceHeader& header, std::string_view packet, std::size_t buffers) const;
  at::Tensor room_for(const BufferSpec& spec, bool is_lent, Assembly& assembly);
  void take_buffer(const Arrival& arrival, Assembly& assembly);
  void refuse(const Arrival& arrival, const char* why);
  void skip(const PieceHeader& header, Assembly& assembly, const std::string& why);
  void release_in_order(base::Rank from);

  Worker& worker_;
  const LentMemory& lent_;
  std::vector<Peer> peers_;
  std::vector<Arrival> arrivals_, deferred_;
  std::deque<Received> ready_;
  std::deque<Offer> offers_;
  std::int64_t dropped_ = 0;
  std::int64_t next_warning_s_ = 0;
};

}  // namespace lamina::transport::ucx
