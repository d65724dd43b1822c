// SPDX-License-Identifier: Apache-2.0
// Failures that end a step on all ranks, and what is left of it.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <atomic>

#include "lamina/base/error.h"
#include "tests/pipeline/pipeline_fixture.h"
#include "tests/soak.h"

namespace lamina::pipeline {
namespace {

using value::Value;

struct Interrupted : std::runtime_error {
  Interrupted() : std::runtime_error("interrupted by the user") {}
};

const std::function<void()> kNothing = [] {};

void wait_for(const std::function<bool()>& ready) {
  const auto deadline = base::Deadline::after(std::chrono::seconds(30));
  while (!ready() && !deadline.expired()) std::this_thread::yield();
}

void expect_all(const std::vector<Pipeline::Outcome>& outcomes, const std::string& text) {
  for (const auto& outcome : outcomes) {
    const auto message = message_of(outcome.error);
    EXPECT_TRUE(text.empty() ? message.empty() : message.find(text) != std::string::npos) << message;
  }
}

// The main threads of ranks that are given what ends them.
std::vector<Pipeline::Outcome> step_with(Pipeline& pipeline, int microbatches, const Job::Body& body,
                                         const std::vector<std::function<void()>>& interrupts) {
  std::vector<Pipeline::Outcome> outcomes(pipeline.size());
  std::vector<std::thread> mains;
  for (int rank = 0; rank < pipeline.size(); ++rank) {
    mains.emplace_back([&, rank] {
      try {
        outcomes[rank].outputs = pipeline.job(rank).run_step({microbatches, body, interrupts[rank]}).outputs;
      } catch (...) {
        outcomes[rank].error = std::current_exception();
      }
    });
  }
  for (auto& main : mains) main.join();
  return outcomes;
}

TEST(Interrupt, WhileAMicrobatchComputesEndsTheStepAndTheJobGoesOn) {
  Pipeline pipeline(1, "simple");
  std::atomic<int> checks = 0;
  const auto interrupt_once = [&] {
    if (++checks == 1) throw Interrupted();
  };
  const auto body = [&](base::Microbatch) {
    wait_for([&] { return checks >= 3; });  // until long after the main thread has left the wait for outputs
    return Value(at::ones({2}));
  };
  EXPECT_THROW(pipeline.job(0).run_step({2, body, interrupt_once}), Interrupted);
  EXPECT_EQ(pipeline.job(0).run_step({2, body, interrupt_once}).outputs.size(), 2);
}

TEST(LostRank, WhileAMicrobatchComputesEndsTheStepAndTheMicrobatchWritesNowhere) {
  Pipeline pipeline(2, "simple");
  std::atomic<bool> killed = false;
  std::atomic<int> checks = 0;
  const auto body = [&](base::Microbatch) {
    pipeline.network().kill(base::Rank(1));
    killed = true;
    wait_for([&] { return checks >= 5; });  // until long after the main thread has left the wait for outputs
    return Value(at::ones({2}));
  };
  EXPECT_THROW(pipeline.job(0).run_step({1, body, [&] { checks += killed; }}), base::PeerError);
}

// Takes its time to be destroyed on another thread than the one that made it.
struct SlowToGo {
  explicit SlowToGo(std::function<void()> wait) : wait(std::move(wait)) {}
  SlowToGo(const SlowToGo&) = default;
  ~SlowToGo() {
    if (std::this_thread::get_id() != home) wait();
  }
  std::function<void()> wait;
  std::thread::id home = std::this_thread::get_id();
};

TEST(Interrupt, AfterTheLastMicrobatchIsNotLostAndTheJobGoesOn) {
  Pipeline pipeline(1, "simple");
  std::atomic<bool> ended = false;
  std::atomic<int> checks = 0;
  const auto interrupt_once = [&] {
    if (ended && ++checks == 1) throw Interrupted();
  };
  const SlowToGo slow([&] { wait_for([&] { return checks > 0; }); });
  const auto body = [&ended, slow](base::Microbatch) {
    ended = true;
    return Value();
  };
  EXPECT_THROW(pipeline.job(0).run_step({1, body, interrupt_once}), Interrupted);
  EXPECT_NO_THROW(pipeline.job(0).run_step({1, body, interrupt_once}));
}

TEST(Interrupt, OfAFollowerEndsTheStepEverywhereWithThatErrorAndNotAConsequence) {
  for (std::uint64_t seed = 0; seed < lamina::test::in_a_soak<std::uint64_t>(30, 10); ++seed) {
    Pipeline pipeline(3, "interleaved", seed);
    std::atomic<bool> reached = false, over = false;
    const auto stuck = pipeline.add("stuck", 2, [&](Job&) {
      return [&](Value x) {
        reached = true;
        wait_for([&] { return over.load(); });
        return x;
      };
    });
    const auto swallows = pipeline.add("swallows", 1, [&, stuck](Job& job) {
      return [&, stuck](Value x) -> Value {
        try {
          return job.call(stuck, std::move(x));
        } catch (const std::exception&) {
          throw std::logic_error("a consequence");
        }
      };
    });
    std::atomic<bool> interrupted = false;
    const auto interrupt = [&] {
      if (reached && !interrupted.exchange(true)) throw Interrupted();
    };
    // The stuck module goes on once the leader has heard of the interrupt: its body ends in no other way.
    const auto body = [&](base::Microbatch) -> Value {
      try {
        return pipeline.job(0).call(swallows, std::int64_t{1});
      } catch (...) {
        over = true;
        throw;
      }
    };
    const auto outcomes = step_with(pipeline, 1, body, {kNothing, interrupt, kNothing});
    expect_all(outcomes, "interrupted by the user");
    expect_all(pipeline.step(1, [&](base::Microbatch) { return Value(); }), "");
  }
}

TEST(Outputs, ThatCannotTravelEndTheStepOnAllRanksWithThatError) {
  Pipeline pipeline(3, "simple");
  expect_all(pipeline.step(2, [](base::Microbatch) { return Value(at::ones({2, 2}).to_sparse()); }),
             "cannot be sent to another rank");
  expect_all(pipeline.step(2, [](base::Microbatch) { return Value(at::ones({2, 2})); }), "");
}

// A face whose description of an error fails, or cannot travel.
class ClumsyFailures : public value::Failures {
 public:
  value::Failure describe(std::exception_ptr error, base::Rank rank) override {
    if (message_of(error) == "indescribable") throw std::runtime_error("no words");
    auto failure = Failures::describe(error, rank);
    if (message_of(error) == "with an object") failure.object = Value(at::ones({2, 2}).to_sparse());
    return failure;
  }
};

TEST(Errors, ThatCannotBeDescribedOrSentEndTheStepOnAllRanksAllTheSame) {
  for (const auto* text : {"indescribable", "with an object"}) {
    for (int raising = 0; raising < 2; ++raising) {
      Pipeline pipeline(2, JobOptions{.failures = std::make_shared<ClumsyFailures>()});
      const auto raises = pipeline.add("raises", raising,
                                       [&](Job&) { return [&](Value) -> Value { throw std::runtime_error(text); }; });
      const auto outcomes = pipeline.step(1, [&](base::Microbatch) { return pipeline.job(0).call(raises, Value()); });
      for (const auto& outcome : outcomes) EXPECT_NE(outcome.error, nullptr) << text << " on rank " << raising;
      expect_all(pipeline.step(1, [](base::Microbatch) { return Value(); }), "");
    }
  }
}

TEST(Usage, ABackwardOfTheModelInsideAModuleOfAnotherRankIsAnErrorUnderAnySchedule) {
  for (const auto* schedule : {"simple", "interleaved"}) {
    Pipeline pipeline(2, schedule);
    const auto module = pipeline.add("greedy", 1, [](Job& job) {
      return [&job](Value x) {
        job.backward({x.as<at::Tensor>().sum()}, {}, 1);
        return x;
      };
    });
    const auto x = at::ones({2}).set_requires_grad(true);
    expect_all(pipeline.step(2, [&](base::Microbatch) { return pipeline.job(0).call(module, x); }), "step function");
  }
}

TEST(NoGrad, AResultThatIsTheArgumentOrAParameterKeepsItsGraphAsItDoesLocally) {
  Pipeline pipeline(2, "simple");
  const auto weight = at::ones({2}).set_requires_grad(true), x = at::ones({2}).set_requires_grad(true);
  const auto module = pipeline.add("passes", 1, [&](Job&) {
    return [&](Value v) { return Value(value::List{{v, weight, v.as<at::Tensor>() * 2}}); };
  });
  expect_all(pipeline.step(1,
                           [&](base::Microbatch) {
                             Value outputs;
                             {
                               at::NoGradGuard no_grad;
                               outputs = pipeline.job(0).call(module, x * 1 + x);
                               EXPECT_FALSE(outputs.as<value::List>().items[0].as<at::Tensor>().requires_grad());
                               outputs = pipeline.job(0).call(module, x);
                             }
                             const auto& items = outputs.as<value::List>().items;
                             EXPECT_FALSE(items[2].as<at::Tensor>().requires_grad());
                             const auto sum = items[0].as<at::Tensor>() * 3 + items[1].as<at::Tensor>() * 5;
                             pipeline.job(0).backward({sum.sum()}, {}, 1);
                             return Value();
                           }),
             "");
  EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 3.0)));
  EXPECT_TRUE(at::equal(weight.grad(), at::full({2}, 5.0)));
}

TEST(Memory, NothingOfAStepIsKeptAfterIt) {
  Pipeline pipeline(2, "interleaved");
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> seen;
  std::mutex mutex;
  const auto remember = [&](const at::Tensor& tensor) {
    auto storage = tensor.storage().getWeakStorageImpl();  // may wait for the other rank
    std::lock_guard guard(mutex);
    seen.push_back(std::move(storage));
  };
  std::atomic<bool> fail = false;
  const auto module = pipeline.add("square", 1, [&](Job&) {
    return [&](Value x) {
      const auto y = x.as<at::Tensor>() * x.as<at::Tensor>();
      remember(x.as<at::Tensor>());
      remember(y);
      if (fail) throw std::runtime_error("on purpose");
      return Value(y);
    };
  });
  const auto body = [&](base::Microbatch) {
    const auto y = pipeline.job(0).call(module, at::ones({3}).set_requires_grad(true)).as<at::Tensor>();
    remember(y);
    return Value();  // no backward: the graph is not used up
  };
  for (int step = 0; step < 4; ++step) {
    fail = step % 2 == 1;
    expect_all(pipeline.step(3, body), fail ? "on purpose" : "");
    for (const auto& storage : seen) EXPECT_TRUE(storage.expired());
    seen.clear();
  }
}

}  // namespace
}  // namespace lamina::pipeline
