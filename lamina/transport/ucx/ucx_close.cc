// SPDX-License-Identifier: Apache-2.0
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

#include "lamina/transport/ucx/ucx_transport.h"

// [Note: orderly close] An orderly close tells each peer how much it was sent (messages, puts and ends of puts), and
// waits until they have arrived. A peer's transport answers at once, however much is still under way: one that does not
// is frozen, and nobody waits for it on top of what told so. When every rank leaves at the same time, they close their
// endpoints, tell each other so, and free UCX's objects. In every other case these are leaked on purpose: a peer that
// died, or lives on, may hold memory they share.
namespace lamina::transport::ucx {
namespace {

constexpr auto kKept = std::chrono::seconds(1);      // for connections that words wait for
constexpr auto kAnswer = std::chrono::seconds(2);    // from the beginning, for a peer to answer at all
constexpr auto kArrival = std::chrono::seconds(5);   // for our last messages to arrive
constexpr auto kTogether = std::chrono::seconds(1);  // for the other ranks to leave as well, and for each step of it

}  // namespace

template <class Condition>
bool UcxTransport::all_peers(Lock& lock, Clock::duration patience, const Condition& condition) {
  return changed_.wait_for(lock, patience, [&] {
    for (int peer = 0; peer < size(); ++peer) {
      if (peers_[peer].met && !condition(peers_[peer])) return false;
    }
    return true;
  });
}

void UcxTransport::tell_interrupted() {
  std::lock_guard closing(close_mutex_);
  if (closed_ || ::getpid() != process_) return;
  for (int peer = 0; peer < size(); ++peer) {
    liveness_->note(base::Rank(peer), Liveness::Kind::kInterrupted);
  }
}

void UcxTransport::close(bool orderly) {
  std::lock_guard closing(close_mutex_);
  if (closed_) return;
  closed_ = true;
  if (::getpid() != process_) {  // a forked child: neither the thread nor the connections are its own
    thread_.detach();
    static_cast<void>(posts_.release());
    static_cast<void>(receiver_.release());
    static_cast<void>(worker_.release());
    static_cast<void>(liveness_.release());
    static_cast<void>(others_.release());
    return;
  }
  bool together = false;
  {
    Lock lock = enter();
    changed_.wait_for(lock, kKept, [&] { return !has_kept_words(); });
    closing_ = true;
    others_.reset();
    changed_.notify_all();
    if (orderly) together = say_goodbye(lock);
  }
  stop_ = true;
  ::eventfd_write(stop_event_.get(), 1);
  thread_.join();
  silence_.reset();
  wake_.reset();
  stop_event_.reset();
  liveness_.reset();
  if (together) {
    worker_.reset();
    posts_.reset();
    receiver_.reset();
  } else {
    worker_->leak();
    static_cast<void>(receiver_.release());  // UCX may still write to its buffers; posts keep theirs themselves
  }
}

bool UcxTransport::say_goodbye(Lock& lock) {
  const auto answered_by = Clock::now() + kAnswer;
  changed_.wait_for(lock, kTogether, [&] { return waiting_ == 0; });
  posts_->close();
  for (int rank = 0; rank < size(); ++rank) {
    const Peer& peer = peers_[rank];
    if (peer.met) liveness_->note(base::Rank(rank), Liveness::Kind::kBye, peer.sent + peer.puts + peer.ends_sent);
  }
  all_peers(lock, answered_by - Clock::now(), [](const Peer& peer) { return peer.answered || peer.gone; });
  all_peers(lock, kArrival, [](const Peer& peer) { return peer.arrived || peer.gone || !peer.answered; });
  if (!all_peers(lock, {}, [](const Peer& peer) { return peer.arrived || peer.gone; })) return false;
  const bool together =
      all_peers(lock, kTogether, [](const Peer& peer) { return peer.gone || (peer.bye && !peer.why.empty()); });
  const bool all_well = std::all_of(peers_.begin(), peers_.end(),
                                    [&](const Peer& peer) { return peer.met ? peer.arrived && peer.bye : !peer.gone; });
  return together && all_well && close_endpoints(lock);
}

bool UcxTransport::close_endpoints(Lock& lock) {
  std::vector<ucs_status_ptr_t> requests;
  const ucp_request_param_t param{};  // flushes
  for (Peer& peer : peers_) {
    if (peer.endpoint != nullptr) requests.push_back(ucp_ep_close_nbx(peer.endpoint, &param));
  }
  worker_->signal();
  bool flushed = true;
  for (const auto deadline = base::Deadline::after(kTogether); const ucs_status_ptr_t request : requests) {
    if (request == nullptr) continue;
    while (UCS_PTR_IS_PTR(request) && ucp_request_check_status(request) == UCS_INPROGRESS && !deadline.expired()) {
      changed_.wait_for(lock, std::chrono::milliseconds(1));
    }
    flushed = flushed && UCS_PTR_IS_PTR(request) && ucp_request_check_status(request) == UCS_OK;
    if (flushed) ucp_request_free(request);
  }
  if (!flushed) return false;
  for (int peer = 0; peer < size(); ++peer) {
    liveness_->note(base::Rank(peer), Liveness::Kind::kFlushed);
  }
  all_peers(lock, kTogether, [](const Peer& peer) { return peer.flushed || peer.gone; });
  return std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return !peer.met || peer.flushed; });
}

}  // namespace lamina::transport::ucx
