// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "lamina/base/deadline.h"
#include "lamina/base/fd.h"
#include "lamina/transport/liveness.h"
#include "lamina/transport/local_puts.h"
#include "lamina/transport/ucx/peer_memory.h"
#include "lamina/transport/ucx/plugin.h"
#include "lamina/transport/ucx/posts.h"
#include "lamina/transport/ucx/probe.h"
#include "lamina/transport/ucx/receiver.h"
#include "lamina/transport/ucx/sending.h"
#include "lamina/transport/ucx/worker.h"

namespace lamina::transport::ucx {

// [Note: threads] One lock guards UCX and all that is below. A sender calls UCX itself, under the lock, and where UCX
// needs the receiver's help (rendezvous, a full queue) waits for the progress thread. That thread alone makes progress,
// reads the liveness sockets and delivers; it delivers without the lock, sleeps when nothing happens, and never throws.
// While nobody computes on this rank, it looks out for a moment before it sleeps: a processor that sleeps too takes
// longer to wake than a small message takes.
class UcxTransport : public Transport, public Probe {
 public:
  UcxTransport(std::unique_ptr<Worker> worker, PeerConnections peers);
  ~UcxTransport() override;

  base::Rank rank() const override { return rank_; }
  int size() const override { return static_cast<int>(peers_.size()); }
  void start(Events events) override;
  void send(base::Rank to, const Message& message) override;
  void tell(base::Rank to, const Message& message) override;
  void give_up_sends(std::optional<base::Step> step) override;
  std::unique_ptr<Transfer> post(base::Rank from, Parcel parcel) override;
  std::unique_ptr<Transfer> put(base::Rank to, Parcel parcel) override;
  void look_out() override;
  void tell_interrupted() override;
  void close(bool orderly) override;

  std::string lanes(base::Rank peer) override;
  void send_raw(base::Rank to, const std::string& header, const std::string& data, unsigned id) override;
  std::int64_t dropped() override;
  std::int64_t rescued() override;
  rendezvous::Secret key(base::Rank to) override;

 private:
  using Clock = base::Clock;
  using Lock = std::unique_lock<std::mutex>;
  struct Peer {
    ucp_ep_h endpoint = nullptr;
    std::optional<rendezvous::Signer> outgoing;
    rendezvous::Secret outgoing_key{};  // for tests: see Probe
    PeerMemory memory;
    std::atomic<bool> reads_us = false;                     // it takes offers
    std::map<std::uint64_t, Sending*> offered;              // by sequence: what waits for its receipt
    std::map<std::uint64_t, std::shared_ptr<Passage>> put;  // by sequence: what has no answer
    std::uint64_t sent = 0, puts = 0, ends_sent = 0, ends_received = 0;
    std::optional<std::uint64_t> bye;  // it leaves on purpose, having sent us that many messages, puts and ends of puts
    bool gone = false;                 // its socket closed
    bool interrupted = false;
    bool answered = false;  // our bye, at once
    bool arrived = false;   // it has all that our bye counted
    bool flushed = false;   // it will touch none of our memory any more
    std::string why;        // it is lost, and the events say so; sends to it throw
    std::string gone_why;
  };
  struct Lost {
    base::Rank peer;
    std::string why;
  };
  using Delivery = std::variant<Receiver::Received, Lost>;

  // sending (ucx_send.cc)
  Lock enter();
  std::unique_ptr<Sending> sending_of(base::Rank to, const Message& message);
  bool is_given_up(const Sending& sending) const;
  void explain_failure(Lock& lock, ucs_status_t status, base::Rank to);
  void send_to_self(Frame frame);
  void post(Sending& sending, base::Rank to);
  void post_piece(Sending& sending, ucp_ep_h endpoint, const PieceHeader& header, const void* data, std::size_t size);
  void wait(Lock& lock, Sending& sending, base::Rank to);
  void require_rank(base::Rank rank) const;
  void require_open() const;
  void refuse_if_lost(base::Rank to) const;
  void accept_receipts();
  static ucs_status_t receipt(void* self, const void* header, size_t header_size, void* data, size_t size,
                              const ucp_am_recv_param_t* param);
  void send_receipt(base::Rank to, std::uint64_t sequence, bool all);
  static void send_header(ucp_ep_h endpoint, unsigned id, std::string header);
  static void sent(void* request, ucs_status_t status, void* sending);

  // puts (ucx_put.cc)
  class End;
  void post_bytes(ucp_ep_h endpoint, const std::shared_ptr<Passage>& passage);
  bool over(const Passage& passage) const;
  void await(const Passage& passage, const base::Patience& patience);
  void accept_ends_of_puts();
  static ucs_status_t end_of_put(void* self, const void* header, size_t header_size, void* data, size_t size,
                                 const ucp_am_recv_param_t* param);
  void send_ends();

  // progress (ucx_transport.cc)
  void run();
  bool turn();  // false when nothing happened
  void tell_rescue();
  bool copy_offers();
  void collect();
  bool looks_out() const;
  bool sleep();  // false when it was in vain: nothing woke us
  void deliver();
  std::optional<Delivery> next_delivery();
  void hear();                // reads the liveness sockets
  void settle(bool drained);  // tells of lost peers once what they sent has arrived

  // leaving (ucx_close.cc)
  bool say_goodbye(Lock& lock);  // true when all ranks left together: nothing of UCX is needed any more
  bool close_endpoints(Lock& lock);
  template <class Condition>
  bool all_peers(Lock& lock, Clock::duration patience, const Condition& condition);

  const base::Rank rank_;
  const std::chrono::seconds send_timeout_;
  const int process_;  // a forked child must leave everything alone

  std::mutex mutex_;
  std::condition_variable changed_;  // a send ended, a peer was lost or told something, or closing began
  std::atomic<int> entering_ = 0;    // senders that want the lock: the progress thread lets them pass
  std::unique_ptr<Worker> worker_;
  std::unique_ptr<Receiver> receiver_;
  std::unique_ptr<Posts> posts_;
  std::unique_ptr<Liveness> liveness_;
  std::vector<Peer> peers_;
  std::deque<Delivery> deliveries_;
  std::optional<Events> events_;
  bool unsettled_ = false;  // a peer left or died and has not been told of
  Clock::time_point settle_by_;
  bool closing_ = false;
  std::int64_t ended_step_ = kNoStep.value;  // whose sends, and earlier ones', wait no more
  bool leaving_ = false;                     // none does
  int waiting_ = 0;                          // senders within wait(), and whoever awaits a transfer
  LocalPuts own_puts_;

  base::Fd stop_event_;
  base::Fd wake_;  // epoll over UCX, the liveness sockets and stop_event_
  std::atomic<bool> stop_ = false;
  std::atomic<Clock::time_point> look_out_until_ = Clock::time_point();
  std::atomic<bool> asleep_ = false;
  int busy_ = 0;            // times in a row that UCX would not let us sleep
  bool overslept_ = false;  // nothing has woken us from the last sleep
  std::int64_t rescued_ = 0;
  std::mutex close_mutex_;
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace lamina::transport::ucx
