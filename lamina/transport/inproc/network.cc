// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/inproc/network.h"

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"

namespace lamina::transport::inproc {

namespace {

[[noreturn]] void throw_lost(const base::Loss& loss) { throw base::PeerError(loss.text(), loss); }

constexpr auto kEnded = "its process ended";

void deliver(base::Rank from, Frame frame, const Transport::Events& events) {
  try {
    events.message(unpack(frame.head, std::move(frame.buffers)));
  } catch (const base::FormatError& error) {
    base::log_warning(base::str("dropped a message of rank ", from, ": ", error.what()));
  }
}

}  // namespace

class Endpoint : public Transport {
 public:
  Endpoint(Network& network, base::Rank rank) : network_(network), rank_(rank) {}
  ~Endpoint() override { close(false); }

  base::Rank rank() const override { return rank_; }
  int size() const override { return network_.size_; }
  void start(Events events) override { network_.attach(rank_, std::move(events)); }
  void send(base::Rank to, const Message& message) override { send_packed(to, pack(message), message.call.step); }
  void send_packed(base::Rank to, Frame frame, base::Step /*about*/) override {
    for (auto& buffer : frame.buffers) buffer = buffer.clone();
    network_.post(rank_, to, std::move(frame));
  }
  std::unique_ptr<Transfer> post(base::Rank from, Parcel parcel) override {
    return network_.puts_.post(rank_, from, std::move(parcel));
  }
  std::unique_ptr<Transfer> put(base::Rank to, Parcel parcel) override {
    return network_.puts_.put(rank_, to, std::move(parcel));
  }
  void close(bool) override { network_.detach(rank_); }

 private:
  Network& network_;
  const base::Rank rank_;
};

Network::Network(int size, std::uint64_t seed)
    : size_(size), dead_(size, false), random_(seed), thread_([this] { deliver_until_stopped(); }) {}

Network::~Network() {
  {
    std::lock_guard guard(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::unique_ptr<Transport> Network::connect(base::Rank rank) { return std::make_unique<Endpoint>(*this, rank); }

void Network::post(base::Rank from, base::Rank to, Frame frame) {
  {
    std::lock_guard guard(mutex_);
    if (to.value < 0 || to.value >= size_)
      throw base::InternalError(base::str("a message to rank ", to, " in a world of ", size_));
    if (dead_[to.value]) throw_lost({to, kEnded, ""});
    if (dead_[from.value]) return;
    queues_[{from, to}].emplace_back(std::move(frame));
  }
  changed_.notify_all();
}

void Network::hold(base::Rank from, base::Rank to) {
  std::lock_guard guard(mutex_);
  held_.insert({from, to});
}

void Network::release(base::Rank from, base::Rank to) {
  {
    std::lock_guard guard(mutex_);
    held_.erase({from, to});
  }
  changed_.notify_all();
}

void Network::kill(base::Rank rank) {
  {
    std::lock_guard guard(mutex_);
    if (dead_[rank.value]) return;
    dead_[rank.value] = true;
    attached_.erase(rank);
    for (int other = 0; other < size_; ++other) {
      queues_.erase({base::Rank(other), rank});
      if (!dead_[other]) queues_[{rank, base::Rank(other)}].emplace_back(std::nullopt);
    }
  }
  changed_.notify_all();
  puts_.lose({rank, kEnded, ""});
}

void Network::attach(base::Rank rank, Transport::Events events) {
  {
    std::lock_guard guard(mutex_);
    attached_[rank] = std::move(events);
  }
  changed_.notify_all();
}

void Network::detach(base::Rank rank) {
  std::unique_lock lock(mutex_);
  attached_.erase(rank);
  // Bounded: events do not block.
  changed_.wait(lock, [&] { return delivering_to_ != rank; });
}

std::optional<Network::Pair> Network::choose() {
  std::vector<Pair> ready;
  for (const auto& [pair, queue] : queues_) {
    if (!queue.empty() && attached_.contains(pair.second) && !held_.contains(pair)) ready.push_back(pair);
  }
  if (ready.empty()) return std::nullopt;
  return ready[random_() % ready.size()];
}

void Network::deliver_until_stopped() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const auto pair = choose();
    if (!pair) {
      changed_.wait(lock);  // until a message, a rank or the end comes; every waiter above has its own deadline
      continue;
    }
    const auto queue = queues_.find(*pair);
    std::optional<Frame> frame = std::move(queue->second.front());
    queue->second.pop_front();
    if (queue->second.empty()) queues_.erase(queue);  // so that a large job has few to choose from
    const Transport::Events events = attached_.at(pair->second);
    delivering_to_ = pair->second;
    lock.unlock();
    if (frame) {
      deliver(pair->first, std::move(*frame), events);
    } else {
      events.lost(pair->first, kEnded);
    }
    lock.lock();
    delivering_to_.reset();
    changed_.notify_all();
  }
}

}  // namespace lamina::transport::inproc
