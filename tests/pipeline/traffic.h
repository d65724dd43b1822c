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
#include "lamina/transport/forwarding.h"
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
class WatchedTransport : public transport::ForwardingTransport {
 public:
  WatchedTransport(std::unique_ptr<Transport> inner, Traffic& traffic)
      : ForwardingTransport(std::move(inner)), traffic_(traffic) {}

  void send(base::Rank to, const transport::Message& message) override {
    traffic_.note(rank(), to, message);
    ForwardingTransport::send(to, message);
  }
  void tell(base::Rank to, const transport::Message& message) override { send(to, message); }

 private:
  Traffic& traffic_;
};

}  // namespace lamina::pipeline
