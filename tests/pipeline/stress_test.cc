// SPDX-License-Identifier: Apache-2.0
// Random models over random ranks, schedules and arrival orders, with something going wrong at a random moment.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <random>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "tests/pipeline/pipeline_fixture.h"
#include "tests/soak.h"

namespace lamina::pipeline {
namespace {

using value::Value;

enum class Fault { kNone, kForwardThrows, kBackwardThrows, kKilled, kInterrupted };

struct Interrupted : std::runtime_error {
  Interrupted() : std::runtime_error("interrupted on purpose") {}
};

int threads_of_this_process() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<int>(std::distance(begin(tasks), end(tasks)));
}

// Module i multiplies its argument by its weight, and adds what the modules it calls, all of higher numbers, make of
// it. Or it only passes on, unread, what one gives to the next.
struct Model {
  struct Module {
    int owner = 0;
    bool passes_on = false;
    std::vector<int> calls;
  };
  std::vector<Module> modules;
  std::vector<at::Tensor> weights;

  template <class Call>
  at::Tensor run(int index, at::Tensor x, const Call& call) const {
    if (modules[index].passes_on) {
      for (int callee : modules[index].calls) x = call(callee, x);
      return x;
    }
    at::Tensor y = x * weights[index];
    for (int callee : modules[index].calls) y = y + call(callee, y);
    return y;
  }
  at::Tensor run_here(int index, const at::Tensor& x) const {
    return run(index, x, [this](int callee, const at::Tensor& y) { return run_here(callee, y); });
  }
};

Model random_model(int ranks, std::mt19937_64& random) {
  Model model;
  const int size = 2 + static_cast<int>(random() % 4);
  for (int i = 0; i < size; ++i) {
    model.modules.push_back({static_cast<int>(random() % ranks), false, {}});
    for (int left = static_cast<int>(random() % 3); left > 0 && i + 1 < size; --left) {
      model.modules.back().calls.push_back(i + 1 + static_cast<int>(random() % (size - i - 1)));
    }
    model.modules.back().passes_on = !model.modules.back().calls.empty() && random() % 2 == 0;
    model.weights.push_back(at::full({2}, 0.5 + 0.25 * i, at::kDouble).set_requires_grad(true));
  }
  return model;
}

class Scenario {
 public:
  explicit Scenario(std::uint64_t seed)
      : random_(seed),
        ranks_(1 + static_cast<int>(random_() % 3)),
        microbatches_(1 + static_cast<int>(seed % 4 == 0 ? random_() % 16 : random_() % 4)),
        model_(random_model(ranks_, random_)),
        pipeline_(ranks_, std::array{"simple", "interleaved", "zero_bubble"}[random_() % 3], seed,
                  1 + static_cast<int>(random_() % 3)) {
    for (std::size_t i = 0; i < model_.modules.size(); ++i) add(static_cast<int>(i));
  }
  ~Scenario() { pipeline_.network().kill(base::Rank(0)); }  // as rough as it gets

  void run() {
    step(Fault::kNone);
    const auto fault = static_cast<Fault>(random_() % 5);
    victim_ = static_cast<int>(random_() % ranks_);
    step(fault);
    if (fault == Fault::kKilled && happened_ && ranks_ > 1) {
      EXPECT_TRUE(fails_for_good(pipeline_.job(victim_ == 0 ? 1 : 0)));
    } else {
      step(Fault::kNone);
    }
  }

 private:
  void add(int index) {
    const int owner = model_.modules[index].owner;
    ids_.push_back(pipeline_.add("module" + std::to_string(index), owner, [this, index, owner](Job& job) {
      return [this, index, owner, &job](Value x) {
        strike(Fault::kForwardThrows, owner);
        auto y = model_.run(index, x.as<at::Tensor>(), [&](int callee, const at::Tensor& argument) {
          return job.call(ids_[callee], argument).as<at::Tensor>();
        });
        if (y.requires_grad()) {
          y.register_hook([this, owner](const at::Tensor&) { strike(Fault::kBackwardThrows, owner); });
        }
        return Value(y);
      };
    }));
  }

  // Called wherever a module of `rank` computes: does what was planned for this moment.
  void strike(Fault throws, int rank) {
    if (fault_ == Fault::kNone || --countdown_ != 0) return;
    if (fault_ == throws) {
      happened_ = true;
      throw std::runtime_error("failed on purpose");
    }
    if (fault_ == Fault::kKilled) {
      victim_ = rank;
      happened_ = true;
      pipeline_.network().kill(base::Rank(rank));
    }
    if (fault_ == Fault::kInterrupted) happened_ = true;
  }

  // As soon as the loss is known there too.
  static bool fails_for_good(Job& survivor) {
    const auto deadline = base::Deadline::after(std::chrono::seconds(5));
    while (!deadline.expired()) {
      try {
        survivor.run_step({1, [](base::Microbatch) { return Value(); }, [] {}});
      } catch (const base::PeerError&) {
        return true;
      }
    }
    return false;
  }

  void step(Fault fault) {
    fault_ = fault;
    countdown_ = 1 + static_cast<int>(random_() % 12);
    happened_ = false;
    std::atomic<bool> interrupted = false;
    for (auto& weight : model_.weights) weight.mutable_grad().reset();
    const auto input = at::ones({2}, at::kDouble);
    const auto body = [&](base::Microbatch microbatch) {
      const auto x = input * (microbatch.value + 1.0);
      const auto loss = pipeline_.job(0).call(ids_[0], x).as<at::Tensor>().sum();
      if (loss.requires_grad()) pipeline_.job(0).backward({loss}, {}, 1);
      return Value(loss.detach());
    };
    std::vector<Pipeline::Outcome> outcomes(ranks_);
    std::vector<std::thread> mains;
    const auto begin = std::chrono::steady_clock::now();
    for (int rank = 0; rank < ranks_; ++rank) {
      mains.emplace_back([&, rank] {
        const auto interrupt = [&] {  // a dead process runs nothing; here it must be made to stop
          const bool strikes = fault == Fault::kKilled || fault == Fault::kInterrupted;
          if (strikes && happened_ && rank == victim_ && !interrupted.exchange(true)) throw Interrupted();
        };
        try {
          outcomes[rank].outputs = pipeline_.job(rank).run_step({microbatches_, body, interrupt}).outputs;
        } catch (...) {
          outcomes[rank].error = std::current_exception();
        }
      });
    }
    for (auto& main : mains) main.join();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
    for (int rank = 0; rank < ranks_; ++rank) check(fault, rank, outcomes[rank]);
    if (fault == Fault::kNone) check_gradients(input);
  }

  void check(Fault fault, int rank, const Pipeline::Outcome& outcome) {
    const auto message = message_of(outcome.error);
    const auto says = [&](const std::string& text) { return message.find(text) != std::string::npos; };
    if (!happened_) {
      EXPECT_EQ(message, "");
      EXPECT_EQ(outcome.outputs.size(), microbatches_);
    } else if (fault == Fault::kInterrupted) {
      EXPECT_TRUE(message.empty() || says("interrupted on purpose")) << message;  // too late for some or all
    } else if (fault != Fault::kKilled) {
      EXPECT_TRUE(says("failed on purpose")) << message;
    } else if (rank != victim_) {
      EXPECT_TRUE(says(base::str("rank ", victim_, " is lost"))) << message;
    }
  }

  void check_gradients(const at::Tensor& input) {
    std::vector<at::Tensor> got;
    for (auto& weight : model_.weights) {
      got.push_back(weight.grad());
      weight.mutable_grad().reset();
    }
    for (int i = 0; i < microbatches_; ++i) model_.run_here(0, input * (i + 1.0)).sum().backward();
    for (std::size_t i = 0; i < got.size(); ++i) {
      const auto& wanted = model_.weights[i].grad();
      ASSERT_EQ(got[i].defined(), wanted.defined());
      EXPECT_TRUE(!wanted.defined() || at::allclose(got[i], wanted, 1e-12)) << got[i] << wanted;
    }
  }

  std::mt19937_64 random_;
  const int ranks_, microbatches_;
  Model model_;
  std::vector<base::ModuleId> ids_;
  Fault fault_ = Fault::kNone;
  std::atomic<int> countdown_ = 0;
  std::atomic<int> victim_ = 0;
  std::atomic<bool> happened_ = false;
  Pipeline pipeline_;
};

// LAMINA_SOAK multiplies the seeds, LAMINA_SEED runs one.
TEST(Stress, EveryStepEndsOnEveryRankWithTheRightErrorAndTheJobGoesOnAndNoThreadStays) {
  const char* only = std::getenv("LAMINA_SEED");
  const std::uint64_t first = only != nullptr ? std::stoull(only) : 0;
  const std::uint64_t count = only != nullptr ? 1 : lamina::test::in_a_soak<std::uint64_t>(20000, 60);
  Scenario(0).run();  // what torch keeps running from now on
  const int before = threads_of_this_process();
  for (std::uint64_t seed = first; seed < first + count && !HasFailure(); ++seed) {
    SCOPED_TRACE("LAMINA_SEED=" + std::to_string(seed));
    Scenario(seed).run();
  }
  const auto deadline = base::Deadline::after(std::chrono::seconds(5));  // a joined thread leaves /proc a little later
  while (threads_of_this_process() > before && !deadline.expired()) std::this_thread::yield();
  EXPECT_EQ(threads_of_this_process(), before);
}

}  // namespace
}  // namespace lamina::pipeline
