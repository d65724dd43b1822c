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
#include "lamina/base/peer_memory.h"
#include "lamina/transport/lender.h"
#include "lamina/transport/liveness.h"
#include "lamina/transport/local_puts.h"
#include "lamina/transport/news.h"
#include "lamina/transport/silence.h"
#include "lamina/transport/ucx/lent_memory.h"
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
//
// [Note: endpoints] An endpoint is made when this rank first sends to another one: memory grows with those it talks to.
// Those to the ranks beside it are there from the start. Without any, UCX looks at its memory for messages only when it
// is woken, and between namespaces nothing wakes it.
//
// [Note: first use] Neighbours ([Note: news]) are connected from the start; another rank is when one of the two first
// sends to it. The progress thread shakes hands. Whoever sends waits for the connection, words that nobody waits for
// and puts are kept until it is there. The rank that has accepted a connection uses it once the other one says that it
// knows the keys (kConnected): what came to it earlier would be dropped. A connection that closes before that was none,
// and its end no loss.
class UcxTransport : public Transport, public Lender, public Probe {
 public:
  UcxTransport(std::unique_ptr<Worker> worker, LentMemory lent, PeerConnections peers);
  ~UcxTransport() override;

  base::Rank rank() const override { return rank_; }
  int size() const override { return static_cast<int>(peers_.size()); }
  void start(Events events) override;
  void send(base::Rank to, const Message& message) override;
  void send_packed(base::Rank to, Frame frame, base::Step about) override;
  void tell(base::Rank to, const Message& message) override;
  void give_up_sends(std::optional<base::Step> step) override;
  std::unique_ptr<Transfer> post(base::Rank from, Parcel parcel) override;
  std::unique_ptr<Transfer> put(base::Rank to, Parcel parcel) override;
  void look_out() override;
  void tell_interrupted() override;
  void close(bool orderly) override;

  bool takes(base::Rank to, const at::Tensor& buffer) override;

  std::string lanes(base::Rank peer) override;
  void send_raw(base::Rank to, const std::string& header, const std::string& data, unsigned id) override;
  std::int64_t dropped() override;
  std::int64_t rescued() override;
  int endpoints() override;
  int sockets() override;
  contact::Secret key(base::Rank to) override;

 private:
  using Clock = base::Clock;
  using Lock = std::unique_lock<std::mutex>;
  struct Peer {
    bool met = false;                             // there is a connection, or was one
    std::atomic<bool> open = false;               // and both ends know it: see [Note: first use]
    std::vector<std::unique_ptr<Sending>> words;  // told before it was open
    std::vector<std::shared_ptr<Passage>> early;  // puts of that time
    bool called = false;                          // a connection was asked for
    std::optional<Clock::time_point> refused;     // since when it refuses connections
    std::string address;                          // of its worker, until there is an endpoint
    ucp_ep_h endpoint = nullptr;                  // see [Note: endpoints]
    std::optional<contact::Signer> outgoing;
    contact::Secret outgoing_key{};  // for tests: see Probe
    base::PeerMemory memory;
    std::string lends;                                      // the kind of its device's memory, or ""
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

  void tell_of_lending() const;

  // connections (ucx_connect.cc)
  void meet(base::Rank rank, contact::Connection& connection, bool in_use);
  void unmeet(base::Rank rank);
  void open(base::Rank rank);
  void call(base::Rank to);
  void await_connection(Lock& lock, base::Rank to, std::int64_t step);
  void connect_others();
  void take_event(rendezvous::Switchboard::Event& event);
  void look_for_neighbours();
  void stop_listening();
  void learn(const News::Word& word);
  void tell_news();
  bool has_kept_words() const;

  // sending (ucx_send.cc)
  struct Bytes {
    const void* at;
    std::size_t size;
    ucs_memory_type_t type = UCS_MEMORY_TYPE_HOST;
    std::uint32_t flags = 0;
  };
  Lock enter();
  std::unique_ptr<Sending> sending_of(base::Rank to, Frame frame, base::Step about);
  bool is_given_up(std::int64_t step) const;
  void post_word(std::unique_ptr<Sending> sending, base::Rank to);
  void explain_failure(Lock& lock, ucs_status_t status, base::Rank to);
  void send_to_self(Frame frame);
  ucs_status_t reach(base::Rank to);  // has an endpoint there from now on
  void post(Sending& sending, base::Rank to);
  void post_piece(Sending& sending, ucp_ep_h endpoint, const PieceHeader& header, const Bytes& bytes);
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
  void begin_put(const std::shared_ptr<Passage>& passage);
  void post_bytes(const std::shared_ptr<Passage>& passage);
  bool over(const Passage& passage) const;
  void await(const Passage& passage, const base::Patience& patience);
  void accept_ends_of_puts();
  static ucs_status_t end_of_put(void* self, const void* header, size_t header_size, void* data, size_t size,
                                 const ucp_am_recv_param_t* param);
  void send_ends();

  // progress (ucx_transport.cc)
  void run();
  bool awaits_device();
  bool turn();  // false when nothing happened
  void tell_rescue();
  bool copy_offers();
  void collect();
  bool looks_out() const;
  bool sleep();  // false when it was in vain: nothing woke us
  void deliver();
  std::optional<Delivery> next_delivery();
  void hear();  // reads the liveness sockets
  void take_notes(const std::vector<Liveness::Note>& notes);
  void look_for_silence();
  [[noreturn]] void end_counted_lost(base::Rank by);
  void unsettle();
  void settle(bool drained);  // tells of lost peers once what they sent has arrived

  // leaving (ucx_close.cc)
  bool say_goodbye(Lock& lock);  // true when all ranks left together: nothing of UCX is needed any more
  bool close_endpoints(Lock& lock);
  template <class Condition>
  bool all_peers(Lock& lock, Clock::duration patience, const Condition& condition);

  const base::Rank rank_;
  const std::chrono::seconds send_timeout_;
  const int process_;  // a forked child must leave everything alone
  const LentMemory lent_;

  std::mutex mutex_;
  std::condition_variable changed_;  // a send ended, a peer was lost or told something, or closing began
  std::atomic<int> entering_ = 0;    // senders that want the lock: the progress thread lets them pass
  std::unique_ptr<Worker> worker_;
  std::unique_ptr<Receiver> receiver_;
  std::unique_ptr<Posts> posts_;
  std::unique_ptr<Liveness> liveness_;
  std::optional<Silence> silence_;
  News news_;
  std::unique_ptr<rendezvous::Switchboard> others_;  // with which there is no connection; none while this rank leaves
  std::string trouble_;                              // why none can be made, told once
  Clock::time_point next_look_;                      // for neighbours
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
