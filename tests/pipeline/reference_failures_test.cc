// SPDX-License-Identifier: Apache-2.0
// Failures of calls that returned before they ran.
#include <array>
#include <atomic>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "tests/pipeline/reference_fixture.h"
#include "tests/soak.h"

namespace lamina::pipeline {
namespace {

using value::Value;

void expect_all(const std::vector<Pipeline::Outcome>& outcomes, const std::string& text) {
  for (const auto& outcome : outcomes) {
    const auto message = message_of(outcome.error);
    EXPECT_TRUE(text.empty() ? message.empty() : message.find(text) != std::string::npos) << message;
  }
}

struct Failing {
  explicit Failing(std::uint64_t seed) : model(4, std::array{"simple", "interleaved", "zero_bubble"}[seed % 3], seed) {
    first = model.add_function("first", 1, [this](const at::Tensor& x) {
      if (bad) throw std::out_of_range("the first cause");
      return x * 2;
    });
    second = model.add_function("second", 2, [](const at::Tensor& x) { return x + 1; });
    third = model.add("third", 3, [this](Job& job) {
      return [this, &job](Value v) { return job.call(second, job.call(first, v)); };
    });
  }
  std::atomic<bool> bad = false;
  Model model;
  base::ModuleId first, second, third;
};

TEST(ReferenceFailures, AModuleThatFailsBehindAReferenceEndsTheStepOnAllRanksWithThatError) {
  for (std::uint64_t seed = 0; seed < lamina::test::in_a_soak<std::uint64_t>(40, 10) && !testing::Test::HasFailure();
       ++seed) {
    Failing failing(seed);
    auto& model = failing.model;
    const auto chain = [&](base::Microbatch) { model.call(failing.second, model.call(failing.first, at::ones({3}))); };
    const auto read = [&](base::Microbatch) {
      model.call(failing.second, model.call(failing.first, at::ones({3}))).sum().item<double>();
    };
    const auto nested = [&](base::Microbatch) { model.call(failing.third, at::ones({3})); };
    const auto unread = [&](base::Microbatch) { model.call(failing.first, at::ones({3})); };
    for (const auto& body : std::vector<std::function<void(base::Microbatch)>>{chain, read, nested, unread}) {
      failing.bad = false;
      model.run(3, body);
      model.run(3, body);
      failing.bad = true;
      const auto outcomes = model.attempt(3, body);
      expect_all(outcomes, "std::out_of_range on rank 1: the first cause");
      for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome.error);
        EXPECT_THROW(std::rethrow_exception(outcome.error), value::RemoteFailure);
      }
      failing.bad = false;
      model.run(3, body);
    }
  }
}

TEST(ReferenceFailures, ANestedCallThatFailedUnreadBeforeItsCallerReturnedEndsTheStep) {
  Failing failing(0);
  auto& model = failing.model;
  const auto echo = model.add_function("echo", 1, [](const at::Tensor& x) { return x * 1; });
  const auto caller = model.add("caller", 3, [&](Job& job) {
    return [&](Value v) {
      job.call(failing.first, v);
      // By then the answer of that call is here.
      for (int i = 0; i < 5; ++i) tensor_in(job.call(echo, v)).sum().item<double>();
      return v;
    };
  });
  for (int step = 0; step < 4; ++step) {
    failing.bad = step % 2 == 1;
    expect_all(model.attempt(1, [&](base::Microbatch) { model.call(caller, at::ones({3})); }),
               failing.bad ? "std::out_of_range on rank 1: the first cause" : "");
  }
}

TEST(ReferenceFailures, AnErrorSurfacesWhereItIsReadAndTheUserMayHandleItThere) {
  Failing failing(0);
  auto& model = failing.model;
  for (int step = 0; step < 4; ++step) {
    failing.bad = step % 2 == 1;
    bool met = false;
    model.run(1, [&](base::Microbatch) {
      const auto y = model.call(failing.first, at::ones({3}));
      try {
        y.sum();
      } catch (const value::RemoteFailure&) {
        met = true;
      }
    });
    EXPECT_EQ(met, failing.bad);
  }
}

TEST(ReferenceFailures, OneThatTheUserHandledIsHandledInWhateverWasGivenTheResult) {
  for (std::uint64_t seed = 0; seed < lamina::test::in_a_soak<std::uint64_t>(20, 6) && !testing::Test::HasFailure();
       ++seed) {
    Failing failing(seed);
    auto& model = failing.model;
    const auto handle = [](const at::Tensor& y) {
      try {
        y.sum().item<double>();
      } catch (const value::RemoteFailure&) {
      }
    };
    for (int step = 0; step < 4; ++step) {
      failing.bad = step >= 2;
      model.run(2, [&](base::Microbatch) {
        const auto y = model.call(failing.first, at::ones({3}));
        const auto left = model.call(failing.second, y), right = model.call(failing.second, y);
        const auto end = model.call(failing.second, right);
        handle(step == 2 ? y : left);  // the first cause, or one consequence of several
      });
      const auto outcomes = model.attempt(1, [&](base::Microbatch) {
        model.call(failing.first, at::ones({3}));
        handle(model.call(failing.first, at::ones({3})));
      });
      expect_all(outcomes, failing.bad ? "the first cause" : "");  // two causes that are alike are two
    }
  }
}

TEST(ReferenceFailures, AWaitThatIsTooLongSaysWhoWaitedForWhatOfWhomHowLongAndWhatToDo) {
  const auto second = std::chrono::seconds(1);
  Model model(2, "simple", /*seed=*/0, /*active=*/1, /*deterministic=*/false, second);
  Gate gate;
  std::atomic<bool> in_backward = false;
  const auto module = model.add_function("blocks.slow", 1, [&](const at::Tensor& x) {
    if (!in_backward) gate.pass();
    const auto y = x * 2;
    if (in_backward) y.register_hook([&](const at::Tensor&) { gate.pass(); });
    return y;
  });
  const auto body = [&](base::Microbatch) {
    try {
      const auto y = model.call(module, leaf(1) * 1);
      y.sum().item<double>();
      model.backward(y.sum());
    } catch (...) {
      gate.open();  // else the other rank could not leave the step
      throw;
    }
  };
  const std::vector<bool> places{false, false, true};  // an answer is waited for, a reference, and a gradient
  for (std::size_t i = 0; i < places.size(); ++i) {
    in_backward = places[i];
    gate.shut();
    expect_all(
        model.attempt(1, body),
        base::str("rank 0 waited for the ", in_backward ? "backward" : "forward", " of blocks.slow on rank 1 (step ",
                  2 * i, ", microbatch 0): no answer for 1 s; raise timeout_s if it needs longer"));
    model.run(1, body);
  }
}

TEST(ReferenceFailures, ALostRankEndsEveryWaitForWhatItWasToMake) {
  for (std::uint64_t seed = 0; seed < lamina::test::in_a_soak<std::uint64_t>(20, 6) && !testing::Test::HasFailure();
       ++seed) {
    Model model(3, "simple", seed);
    Gate gate;
    std::atomic<bool> kills = false, dead = false;
    const auto first = model.add_function("first", 2, [&](const at::Tensor& x) {
      if (kills) {
        model.network().kill(base::Rank(2));
        dead = true;
      }
      return x * 2;
    });
    const auto second = model.add_function("second", 1, [](const at::Tensor& x) { return x + 1; });
    const auto body = [&](base::Microbatch) {
      model.call(second, model.call(first, at::ones({3}))).sum().item<double>();
      return Value();
    };
    model.run(2, [&](base::Microbatch microbatch) { body(microbatch); });
    model.run(2, [&](base::Microbatch microbatch) { body(microbatch); });
    kills = true;
    std::vector<std::string> texts(3);
    std::vector<std::thread> mains;
    for (int rank = 0; rank < 3; ++rank) {
      mains.emplace_back([&, rank] {
        try {
          model.job(rank).run_step({2, body, [&] {
                                      if (rank == 2 && dead) throw std::runtime_error("dead");
                                    }});
        } catch (const std::exception& error) {
          texts[rank] = error.what();
        }
      });
    }
    for (auto& main : mains) main.join();
    for (int rank = 0; rank < 2; ++rank)
      EXPECT_NE(texts[rank].find("rank 2 is lost"), std::string::npos) << texts[rank];
  }
}

}  // namespace
}  // namespace lamina::pipeline
