// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "lamina/messaging/mailbox.h"
#include "lamina/transport/inproc/network.h"

namespace lamina::messaging {

// Ranks of this process, each with a mailbox.
class Mailboxes {
 public:
  explicit Mailboxes(int size, std::uint64_t seed = 0) : network_(size, seed) {
    for (int rank = 0; rank < size; ++rank) {
      ranks_.emplace_back(rank);
      transports_.push_back(network_.connect(base::Rank(rank)));
      handlers_.push_back(std::make_unique<Handlers>());
      boxes_.push_back(std::make_unique<Mailbox>(*transports_.back(), *handlers_.back()));
      Mailbox& box = *boxes_.back();
      transports_.back()->start(
          {[&handlers = *handlers_.back()](transport::Message message) { handlers.receive(std::move(message)); },
           [&box](base::Rank lost, const std::string& why) { box.lose({lost, why, ""}); }});
    }
  }
  ~Mailboxes() {
    for (auto& transport : transports_) transport->close(false);
  }

  Mailbox& operator[](int rank) { return *boxes_[rank]; }
  transport::inproc::Network& network() { return network_; }
  const std::vector<base::Rank>& ranks() const { return ranks_; }

  // Runs `body` once per rank, each in its own thread; what each threw.
  std::vector<std::exception_ptr> run(const std::function<void(int)>& body) {
    std::vector<std::exception_ptr> errors(ranks_.size());
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      threads.emplace_back([&, rank] {
        try {
          body(static_cast<int>(rank));
        } catch (...) {
          errors[rank] = std::current_exception();
        }
      });
    }
    for (auto& thread : threads) thread.join();
    return errors;
  }

 private:
  transport::inproc::Network network_;
  std::vector<base::Rank> ranks_;
  std::vector<std::unique_ptr<transport::Transport>> transports_;
  std::vector<std::unique_ptr<Handlers>> handlers_;
  std::vector<std::unique_ptr<Mailbox>> boxes_;
};

}  // namespace lamina::messaging
