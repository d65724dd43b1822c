// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lamina/model/functions.h"
#include "lamina/session/session.h"

// A job of C++ functions in processes that `lamina run` started: what the C++ benchmarks measure.
namespace lamina::bench {

using Clock = std::chrono::steady_clock;

class BenchSession {
 public:
  explicit BenchSession(config::Config config)
      : session_(std::move(config), environment::read_world(environment::process_environment()), {}),
        functions_(std::make_shared<model::Functions>()) {}
  ~BenchSession() { session_.close(true); }

  // A function that lives on the rank of partition `owner`; every rank adds the same in the same order.
  base::ModuleId add(const std::string& name, int owner, model::Functions::Function function) {
    owners_.push_back(session_.owner(base::Partition(owner)));
    return functions_->add(name, std::move(function));
  }

  // Runs a step on every rank; seconds on this one.
  double step(const pipeline::Job::Body& body) {
    if (!ready_) job().set_model(functions_, owners_);
    ready_ = true;
    const auto begin = Clock::now();
    job().run_step({session_.config().microbatches, body, [] {}});
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

  pipeline::Job& job() { return session_.job(); }
  bool leads() { return job().leads(); }

 private:
  session::Session session_;
  std::shared_ptr<model::Functions> functions_;
  std::vector<base::Rank> owners_;
  bool ready_ = false;
};

}  // namespace lamina::bench
