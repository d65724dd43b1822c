// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/ucx/ucx_transport.h"

#include <c10/core/StreamGuard.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/rank_list.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"
#include "lamina/device/streams.h"

namespace lamina::transport::ucx {
namespace {

constexpr int kSpins = 200;                                // fruitless turns before sleeping: some ten microseconds
constexpr auto kLookOut = std::chrono::microseconds(100);  // a small call's way there and back, and as long again
constexpr int kPoliteSpins = 100;                  // times that UCX refuses to sleep before others get the processor
constexpr int kListenEvery = 64;                   // busy turns between looks at the liveness sockets
constexpr auto kSettle = std::chrono::seconds(1);  // for what a lost peer sent to be received among other traffic
constexpr auto kLook = std::chrono::microseconds(50);  // how often memory of the device is looked at that is not ready
constexpr int kSleepMs = 100;                          // at most, should UCX fail to wake us

void watch(const base::Fd& epoll, int fd) {
  epoll_event event{EPOLLIN, {.fd = fd}};
  if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    throw base::Error(base::str("cannot watch for events: ", base::system_error()));
  }
}

}  // namespace

UcxTransport::UcxTransport(std::unique_ptr<Worker> worker, LentMemory lent, PeerConnections peers)
    : rank_(peers.rank),
      send_timeout_(peers.send_timeout),
      process_(::getpid()),
      lent_(std::move(lent)),
      worker_(std::move(worker)),
      receiver_(std::make_unique<Receiver>(*worker_, lent_, static_cast<int>(peers.joined.connections.size()))),
      posts_(std::make_unique<Posts>(*worker_, *receiver_, peers.rank, receiver_->size())),
      liveness_(std::make_unique<Liveness>(receiver_->size())),
      silence_(peers.silence ? std::optional<Silence>(std::in_place, receiver_->size(), *peers.silence, Clock::now())
                             : std::nullopt),
      news_(peers.rank, receiver_->size()),
      others_(std::move(peers.joined.others)),
      peers_(peers.joined.connections.size()),
      stop_event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      wake_(::epoll_create1(EPOLL_CLOEXEC)) {
  std::vector<base::Rank> all;
  for (int rank = 0; rank < size(); ++rank) all.emplace_back(rank);
  const auto beside = neighbours(all, static_cast<std::size_t>(rank_.value));
  for (const base::Rank peer : all) {
    auto& connection = peers.joined.connections[peer.value];
    if (connection.socket) meet(peer, connection, std::ranges::find(beside, peer) != beside.end());
  }
  stop_listening();
  for (const int peer : {rank_.value + 1, rank_.value + size() - 1}) {  // see [Note: endpoints]
    if (peer % size() != rank_.value)
      check(reach(base::Rank(peer % size())), base::str("reach rank ", peer % size()).c_str());
  }
  tell_of_lending();
  accept_receipts();
  accept_ends_of_puts();
  for (const int fd : {worker_->event_fd(), liveness_->fd(), stop_event_.get()}) watch(wake_, fd);
  if (others_) watch(wake_, others_->fd());
  thread_ = std::thread([this] {
    ::pthread_setname_np(::pthread_self(), "lamina-ucx");
    run();
  });
}

UcxTransport::~UcxTransport() { close(false); }

void UcxTransport::tell_of_lending() const {
  if (rank_.value != 0 || lent_.kind().empty()) return;
  std::vector<base::Rank> same;  // of those that are connected from the start
  for (int peer = 1; peer < size(); ++peer) {
    if (goes_lent(lent_.kind(), peers_[peer].lends, kLeastLent)) same.emplace_back(peer);
  }
  base::log_info(
      base::str("tensors of ", kLeastLent >> 10, " KiB and more go from device to device, as memory of kind ",
                lent_.kind(), ", from rank 0 to ",
                same.empty() ? std::string("no rank: no other one lends such memory") : base::name_ranks(same)));
}

void UcxTransport::start(Events events) {
  {
    std::lock_guard guard(mutex_);
    base::internal_check(!events_, "a transport was started twice");
    events_ = std::move(events);
  }
  worker_->signal();
}

void UcxTransport::look_out() {
  look_out_until_ = Clock::now() + kLookOut;
  if (asleep_) worker_->signal();
}

bool UcxTransport::looks_out() const { return Clock::now() < look_out_until_.load(); }

void UcxTransport::run() {
  // UCX copies by the device of the thread that calls it; an event makes that one's context this thread's.
  const c10::OptionalStreamGuard on_device(lent_.kind().empty() ? std::nullopt : devices::default_stream());
  if (!lent_.kind().empty()) static_cast<void>(devices::Mark());
  int fruitless = 0;
  for (std::int64_t turns = 0; !stop_; ++turns) {
    bool active = turn();
    active |= copy_offers();
    deliver();
    if (entering_ > 0) std::this_thread::yield();
    fruitless = active ? 0 : fruitless + 1;
    if (active) busy_ = 0;
    if (turns % kListenEvery == 0) hear();
    if (fruitless <= kSpins) continue;
    if (awaits_device()) {
      std::this_thread::sleep_for(kLook);
      continue;
    }
    if (looks_out()) {
      std::this_thread::yield();
      continue;
    }
    overslept_ = !sleep();
    hear();
  }
}

bool UcxTransport::awaits_device() {
  const std::lock_guard guard(mutex_);
  return receiver_->awaits_device();
}

bool UcxTransport::turn() {
  std::lock_guard guard(mutex_);
  const bool unannounced = std::exchange(overslept_, false) && !worker_->announced();
  const bool active = worker_->progress();
  if (unannounced && active) tell_rescue();
  receiver_->take_arrivals();
  send_ends();
  collect();
  if (unsettled_) settle(!active);
  return active;
}

// A wake-up that was only just on its way is none that fails.
void UcxTransport::tell_rescue() {
  if (worker_->announced(std::chrono::milliseconds(1)) || rescued_++ > 0) return;
  base::log_warning(base::str("a message waited up to ", kSleepMs,
                              " ms here: UCX did not wake this process for it, as ",
                              "where ranks share memory and not all namespaces. Set UCX_TLS=tcp,self on all ranks, or ",
                              "see \"Containers\" in docs/launching.md (told once)"));
}

void UcxTransport::collect() {
  for (auto& message : receiver_->ready()) deliveries_.emplace_back(std::move(message));
  receiver_->ready().clear();
}

bool UcxTransport::copy_offers() {
  bool any = false;
  for (Lock lock(mutex_); !receiver_->offers().empty() && !stop_; any = true) {
    const Receiver::Offer offer = std::move(receiver_->offers().front());
    receiver_->offers().pop_front();
    const base::PeerMemory memory = peers_[offer.from.value].memory;
    lock.unlock();
    const bool all = std::all_of(offer.parts.begin(), offer.parts.end(),
                                 [&](const auto& part) { return memory.read(part.to, part.address, part.size); });
    lock.lock();
    send_receipt(offer.from, offer.sequence, all);
    receiver_->copied(offer, all);
    collect();
    if (!silence_) continue;
    lock.unlock();
    hear();  // much to read must not look like silence
    lock.lock();
  }
  return any;
}

bool UcxTransport::sleep() {
  {
    std::lock_guard guard(mutex_);
    if (!deliveries_.empty() && events_) return true;
    if (!worker_->arm()) {
      // There is something to do, or a send waits for room at its receiver, which nothing announces.
      if (++busy_ > kPoliteSpins) std::this_thread::yield();
      if (busy_ < 10 * kPoliteSpins) return true;
    }
  }
  const bool armed = busy_ < 10 * kPoliteSpins;
  asleep_ = true;
  epoll_event events[4];
  const int woken = looks_out() ? 1 : ::epoll_wait(wake_.get(), events, 4, armed ? kSleepMs : 1);
  asleep_ = false;
  return woken != 0 || !armed;
}

std::optional<UcxTransport::Delivery> UcxTransport::next_delivery() {
  std::lock_guard guard(mutex_);
  if (!events_ || deliveries_.empty()) return std::nullopt;
  std::optional<Delivery> next(std::move(deliveries_.front()));
  deliveries_.pop_front();
  return next;
}

void UcxTransport::deliver() {
  while (!stop_) {
    auto next = next_delivery();
    if (!next) return;
    if (const auto* lost = std::get_if<Lost>(&*next)) {
      events_->lost(lost->peer, lost->why);
      continue;
    }
    auto& received = std::get<Receiver::Received>(*next);
    try {
      events_->message(unpack(received.head, std::move(received.buffers)));
    } catch (const std::exception& error) {
      std::lock_guard guard(mutex_);
      receiver_->drop(received.from, error.what());
    }
  }
}

void UcxTransport::hear() {
  const auto notes = liveness_->poll();
  std::lock_guard guard(mutex_);
  const bool gives_sign = silence_ && silence_->look(Clock::now());
  take_notes(notes);
  if (gives_sign) look_for_silence();
  connect_others();
}

void UcxTransport::take_notes(const std::vector<Liveness::Note>& notes) {
  if (notes.empty()) return;
  for (const auto& note : notes) {
    Peer& peer = peers_[note.peer.value];
    if (silence_) silence_->heard(note.peer);
    switch (note.kind) {
      case Liveness::Kind::kGone:
        if (!peer.open) {
          unmeet(note.peer);
          break;
        }
        peer.gone = true;
        peer.gone_why = peer.interrupted ? std::string(base::kInterrupted) : note.why;
        news_.closed(note.peer, peer.interrupted ? News::Fate::kInterrupted : note.fate);
        break;
      case Liveness::Kind::kConnected:
        if (!peer.open) open(note.peer);
        break;
      case Liveness::Kind::kNews: {
        const auto word = Liveness::unpack(note.value, size());
        if (word && news_.hear(note.peer, *word)) learn(*word);
        break;
      }
      case Liveness::Kind::kInterrupted:
        peer.interrupted = true;
        break;
      case Liveness::Kind::kBye:
        peer.bye = note.value;
        news_.left(note.peer);
        liveness_->note(note.peer, Liveness::Kind::kAnswered);
        break;
      case Liveness::Kind::kReadable:
        peer.reads_us = true;
        break;
      case Liveness::Kind::kAnswered:
        peer.answered = true;
        break;
      case Liveness::Kind::kArrived:
        peer.arrived = true;
        break;
      case Liveness::Kind::kFlushed:
        peer.flushed = true;
        break;
      case Liveness::Kind::kAlive:
        break;
      case Liveness::Kind::kCountedLost:
        if (silence_ && silence_->has_stood_still()) end_counted_lost(note.peer);
        break;
    }
  }
  tell_news();
  unsettle();
}

// Gives each peer a sign of life, and gives up those that have given none.
void UcxTransport::look_for_silence() {
  for (int rank = 0; rank < size(); ++rank) {
    const base::Rank each(rank);
    Peer& peer = peers_[rank];
    if (!peer.met || peer.gone) continue;
    if (!peer.open || !silence_->is_silent(each)) {
      liveness_->note(each, Liveness::Kind::kAlive);
      continue;
    }
    liveness_->note(each, Liveness::Kind::kCountedLost);
    liveness_->forget(each);
    peer.gone = true;
    peer.gone_why = why(News::Fate::kSilent);
    news_.closed(each, News::Fate::kSilent);
    tell_news();
    unsettle();
  }
}

// Ends this process, as one that was killed: others go on without it. Its other threads may be about to do what looks
// like a part of their job, such as to write a checkpoint.
void UcxTransport::end_counted_lost(base::Rank by) {
  base::log_warning(
      base::str("this process has stood still, and counts as lost since (rank ", by, " says so): it ends itself"));
  ::kill(::getpid(), SIGKILL);
  while (true) ::pause();
}

void UcxTransport::unsettle() {
  unsettled_ = true;
  settle_by_ = Clock::now() + kSettle;
  changed_.notify_all();
}

void UcxTransport::settle(bool drained) {
  const bool too_late = Clock::now() >= settle_by_;
  unsettled_ = false;
  for (int rank = 0; rank < size(); ++rank) {
    Peer& peer = peers_[rank];
    if (!peer.why.empty() || !(peer.gone || peer.bye)) continue;
    const auto received =
        receiver_->received(base::Rank(rank)) + posts_->received(base::Rank(rank)) + peer.ends_received;
    const bool complete = peer.bye && received >= *peer.bye;
    if (complete) liveness_->note(base::Rank(rank), Liveness::Kind::kArrived);
    if (!complete && !(peer.gone && (drained || too_late))) {
      unsettled_ = true;
      continue;
    }
    peer.why = peer.bye ? kCalledShutdown : peer.gone_why;
    deliveries_.emplace_back(Lost{base::Rank(rank), peer.why});
    changed_.notify_all();
  }
}

}  // namespace lamina::transport::ucx
