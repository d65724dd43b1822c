// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "lamina/transport/inproc/network.h"
#include "tests/messaging/rank_end.h"

namespace lamina::messaging {

// Ranks of this process, each with a mailbox.
class Mailboxes {
 public:
  explicit Mailboxes(int size, std::uint64_t seed = 0) : network_(size, seed) {
    for (int rank = 0; rank < size; ++rank) {
      ranks_.emplace_back(rank);
      ends_.push_back(std::make_unique<RankEnd>(network_.connect(base::Rank(rank))));
      ends_.back()->messenger.start();
    }
  }
  ~Mailboxes() {
    for (auto& end : ends_) end->messenger.close(false);
  }

  Mailbox& operator[](int rank) { return ends_[rank]->messenger.mailbox(); }
  transport::Transport& transport(int rank) { return ends_[rank]->messenger.transport(); }
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
  std::vector<std::unique_ptr<RankEnd>> ends_;
};

}  // namespace lamina::messaging
