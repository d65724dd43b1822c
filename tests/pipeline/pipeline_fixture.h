// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "lamina/model/functions.h"
#include "lamina/pipeline/job.h"
#include "lamina/transport/inproc/network.h"
#include "tests/messaging/rank_end.h"
#include "tests/pipeline/traffic.h"

namespace lamina::pipeline {

// The ranks of one pipeline in this process, each with functions as modules.
class Pipeline {
 public:
  Pipeline(int size, const std::string& schedule, std::uint64_t seed = 0, int active = 3, bool deterministic = false,
           std::chrono::seconds timeout = std::chrono::seconds(60))
      : Pipeline(size,
                 JobOptions{.schedule = schedule,
                            .active_microbatches = active,
                            .deterministic = deterministic,
                            .timeout = timeout},
                 seed) {}
  Pipeline(int size, JobOptions options, std::uint64_t seed = 0) : network_(size, seed) {
    for (int rank = 0; rank < size; ++rank) options.pipeline.emplace_back(rank);
    for (int rank = 0; rank < size; ++rank) {
      auto transport = std::make_unique<WatchedTransport>(network_.connect(base::Rank(rank)), traffic_);
      ranks_.push_back(std::make_unique<OneRank>(options, std::move(transport)));
      modules_.push_back(std::make_shared<model::Functions>());
    }
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  Job& job(int rank) { return ranks_[rank]->job; }
  messaging::Mailbox& mailbox(int rank) { return ranks_[rank]->end.messenger.mailbox(); }
  observe::Recorder& recorder(int rank) { return ranks_[rank]->end.recorder; }
  transport::inproc::Network& network() { return network_; }
  Traffic& traffic() { return traffic_; }

  // `make(job)` gives the function as the rank with that job runs it.
  base::ModuleId add(const std::string& name, int owner, const std::function<model::Functions::Function(Job&)>& make,
                     bool starts_rng_stream = false) {
    base::ModuleId id;
    for (int rank = 0; rank < size(); ++rank) id = modules_[rank]->add(name, make(job(rank)), starts_rng_stream);
    owners_.emplace_back(owner);
    for (int rank = 0; rank < size(); ++rank) job(rank).set_model(modules_[rank], owners_);
    return id;
  }

  // One step on all ranks; the outputs, or the exception, of each.
  struct Outcome {
    std::vector<value::Value> outputs;
    bool backward = false;
    std::exception_ptr error;
  };
  std::vector<Outcome> step(int microbatches, const Job::Body& body) {
    std::vector<Outcome> outcomes(size());
    std::vector<std::thread> mains;
    for (int rank = 0; rank < size(); ++rank) {
      mains.emplace_back([&, rank] {
        try {
          auto result = job(rank).run_step({microbatches, body, [] {}});
          outcomes[rank] = {std::move(result.outputs), result.backward, nullptr};
        } catch (...) {
          outcomes[rank].error = std::current_exception();
        }
      });
    }
    for (auto& main : mains) main.join();
    return outcomes;
  }

 private:
  struct OneRank {
    OneRank(const JobOptions& options, std::unique_ptr<transport::Transport> transport)
        : end(std::move(transport)), job(options, end.messenger, end.recorder) {
      end.messenger.start();
    }
    messaging::RankEnd end;
    Job job;
  };

  transport::inproc::Network network_;
  Traffic traffic_;
  std::vector<std::shared_ptr<model::Functions>> modules_;
  std::vector<base::Rank> owners_;
  std::vector<std::unique_ptr<OneRank>> ranks_;
};

// The text of `error`; "" for none.
inline std::string message_of(std::exception_ptr error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    return caught.what();
  }
}

}  // namespace lamina::pipeline
