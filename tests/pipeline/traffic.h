// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "lamina/pipeline/step_messages.h"
#include "lamina/remote/protocol.h"
#include "lamina/transport/transport.h"
#include "lamina/value/encoding.h"

namespace lamina::pipeline {

// Messages that the ranks of a pipeline sent each other.
class Traffic {
 public:
  struct Sent {
    std::int64_t from, to;
    transport::Kind kind;
    std::int64_t elements;  // of all tensors in the body
    std::int64_t bytes;     // of the buffers that the body is sent in
  };

  // Called in the sender's thread before each message leaves; set it before anything is sent.
  std::function<void(const transport::Message&)> before;

  void note(base::Rank from, base::Rank to, const transport::Message& message) {
    if (before) before(message);
    std::int64_t elements = 0;
    value::for_each_tensor(message.body, [&](const at::Tensor& tensor) {
      if (tensor.defined()) elements += tensor.numel();
    });
    std::int64_t bytes = 0;
    for (const auto& buffer : value::encode(message.body).buffers) bytes += static_cast<std::int64_t>(buffer.nbytes());
    std::lock_guard guard(mutex_);
    sent_.push_back({from.value, to.value, message.kind, elements, bytes});
  }
  void clear() {
    std::lock_guard guard(mutex_);
    sent_.clear();
  }

  std::int64_t count(const std::function<bool(const Sent&)>& is_counted) const {
    std::lock_guard guard(mutex_);
    return std::ranges::count_if(sent_, is_counted);
  }
  std::int64_t count(transport::Kind kind) const {
    return count([&](const Sent& sent) { return sent.kind == kind; });
  }
  // By pairs of ranks: from, to.
  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> bytes() const {
    std::lock_guard guard(mutex_);
    std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> bytes;
    for (const auto& sent : sent_) {
      if (sent.bytes > 0) bytes[{sent.from, sent.to}] += sent.bytes;
    }
    return bytes;
  }
  // Sums over the tensors that went from one rank to the other.
  std::int64_t elements(std::int64_t from, std::int64_t to) const {
    std::lock_guard guard(mutex_);
    std::int64_t sum = 0;
    for (const auto& sent : sent_) sum += sent.from == from && sent.to == to ? sent.elements : 0;
    return sum;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Sent> sent_;
};

// A transport whose messages are noted before they leave.
class WatchedTransport : public transport::Transport {
 public:
  WatchedTransport(std::unique_ptr<Transport> inner, Traffic& traffic) : inner_(std::move(inner)), traffic_(traffic) {}

  base::Rank rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  void start(Events events) override { inner_->start(std::move(events)); }
  void send(base::Rank to, const transport::Message& message) override {
    traffic_.note(rank(), to, message);
    inner_->send(to, message);
  }
  std::unique_ptr<transport::Transfer> post(base::Rank from, transport::Parcel parcel) override {
    return inner_->post(from, std::move(parcel));
  }
  std::unique_ptr<transport::Transfer> put(base::Rank to, transport::Parcel parcel) override {
    return inner_->put(to, std::move(parcel));
  }
  void close(bool orderly) override { inner_->close(orderly); }

 private:
  const std::unique_ptr<Transport> inner_;
  Traffic& traffic_;
};

}  // namespace lamina::pipeline
