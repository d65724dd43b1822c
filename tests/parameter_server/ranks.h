// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ops/linear.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lamina/parameter_server/service.h"
#include "lamina/transport/inproc/network.h"
#include "tests/messaging/rank_end.h"

namespace lamina::parameter_server {

// Ranks of one job in this process.
class Ranks {
 public:
  explicit Ranks(int size, std::uint64_t seed = 0, std::chrono::seconds timeout = std::chrono::seconds(60))
      : network_(size, seed), timeout_(timeout) {
    for (int rank = 0; rank < size; ++rank) {
      ranks_.push_back(std::make_unique<OneRank>(network_.connect(base::Rank(rank)), timeout));
    }
  }

  Service& operator[](int rank) { return ranks_[rank]->service; }
  transport::inproc::Network& network() { return network_; }
  base::Patience patience() const { return {timeout_}; }

  // Runs `work(rank)` for those ranks, each in a thread of its own; the error of each, or none.
  std::vector<std::exception_ptr> run(const std::vector<int>& ranks, const std::function<void(int)>& work) {
    std::vector<std::exception_ptr> errors(ranks.size());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      threads.emplace_back([&, i] {
        try {
          work(ranks[i]);
        } catch (...) {
          errors[i] = std::current_exception();
        }
      });
    }
    for (auto& thread : threads) thread.join();
    return errors;
  }

 private:
  struct OneRank {
    OneRank(std::unique_ptr<transport::Transport> transport, std::chrono::seconds timeout)
        : end(std::move(transport)), service({.timeout = timeout}, end.messenger) {
      end.messenger.start();
    }
    ~OneRank() { end.messenger.close(/*orderly=*/false); }
    messaging::RankEnd end;
    Service service;
  };

  transport::inproc::Network network_;
  const std::chrono::seconds timeout_;
  std::vector<std::unique_ptr<OneRank>> ranks_;
};

// A module that multiplies by its weight and adds its bias.
inline Placed linear(const std::string& name, const at::Tensor& weight, const at::Tensor& bias) {
  const auto call = [weight, bias](value::Value arguments) -> value::Value {
    return at::linear(arguments.as<at::Tensor>(), weight, bias);
  };
  return {name, call, {{"weight", weight}, {"bias", bias}}};
}

// A context that ends with its block.
class InContext {
 public:
  explicit InContext(Service& service) : context(service.begin_context()), service_(service) {}
  ~InContext() { service_.end_context(context); }
  const std::shared_ptr<AutogradContext> context;

 private:
  Service& service_;
};

inline std::vector<Address> addresses(const RemoteModule& module) {
  std::vector<Address> found;
  for (const auto& parameter : module.parameters) found.push_back(parameter.address);
  return found;
}

inline at::Tensor called(Service& service, const RemoteModule& module, const at::Tensor& input,
                         const base::Patience& patience) {
  return service.trainer().call(module.address, module.label(), input, patience).as<at::Tensor>();
}

}  // namespace lamina::parameter_server
