// SPDX-License-Identifier: Apache-2.0
// How long results are kept where they were made, and what a reference is worth that outlives its step.
#include <atomic>
#include <optional>

#include "lamina/base/error.h"
#include "tests/pipeline/reference_fixture.h"

namespace lamina::pipeline {
namespace {

using value::is_pending;
using value::Value;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

WeakStorage watch(const at::Tensor& tensor) { return tensor.storage().getWeakStorageImpl(); }

// A module of rank 1 whose results are watched.
struct Watched {
  explicit Watched(int ranks = 2) : model(ranks, "simple") {
    module = model.add_function("module", 1, [this](const at::Tensor& x) {
      gate.pass();
      auto y = (x * weight).exp();  // its graph keeps it
      results.push_back(watch(y));
      return y;
    });
  }
  std::int64_t alive() const {
    return std::ranges::count_if(results, [](const auto& result) { return !result.expired(); });
  }
  at::Tensor weight = leaf(2);
  Gate gate;
  std::vector<WeakStorage> results;  // written by whoever has the slot of rank 1
  Model model;
  base::ModuleId module;
};

TEST(ReferenceLifetimes, AnOwnerForgetsWhatItsCallerLetsGoOfWithinTheStep) {
  Watched watched;
  auto& model = watched.model;
  for (int step = 0; step < 3; ++step) {
    watched.results.clear();
    model.run(1, [&](base::Microbatch) {
      for (int i = 0; i < 40; ++i) {
        model.call(watched.module, at::ones({3}, at::kDouble)).sum().item<double>();  // an evaluation with grad on
        // This one, the one whose release goes with the next request, and what a thread that has answered holds yet.
        EXPECT_LE(watched.alive(), 10);
      }
    });
    EXPECT_EQ(watched.alive(), 0);
  }
}

TEST(ReferenceLifetimes, AnOwnerKeepsNothingOfACallThatWasLetGoOfBeforeItRan) {
  Watched watched;
  auto& model = watched.model;
  const auto x = at::ones({3}, at::kDouble);
  model.run(1, [&](base::Microbatch) { model.call(watched.module, x); });
  watched.results.clear();
  watched.gate.shut();
  model.run(1, [&](base::Microbatch) {
    for (int i = 0; i < 20; ++i) model.call(watched.module, x);
    const auto last = model.call(watched.module, x);
    watched.gate.open();
    last.sum().item<double>();
    EXPECT_EQ(watched.results.size(), 21);
    EXPECT_LE(watched.alive(), 5);
  });
}

TEST(ReferenceLifetimes, TheUserMayKeepAReferenceAcrossSteps) {
  Watched watched;
  auto& model = watched.model;
  std::vector<at::Tensor> kept;
  for (int step = 0; step < 3; ++step) {
    model.run(2, [&](base::Microbatch microbatch) {
      const auto y = model.call(watched.module, at::full({3}, microbatch.value, at::kDouble));
      if (microbatch.value == 1) kept.push_back(y);
    });
    EXPECT_EQ(watched.alive(), 0);
  }
  for (const auto& y : kept) EXPECT_DOUBLE_EQ(y[0].item<double>(), std::exp(2.0));
}

TEST(ReferenceLifetimes, AServingRankMayKeepItsChildsResultAcrossSteps) {
  Model model(3, "simple");
  const auto child = model.add_function("child", 2, [](const at::Tensor& x) { return x * 2; });
  std::vector<at::Tensor> stash;
  const auto parent = model.add("parent", 1, [&, child](Job& job) {
    return [&, child](Value v) {
      stash.push_back(tensor_in(job.call(child, v)));
      stash.push_back(tensor_in(job.call(child, v)).detach());
      return Value(tensor_in(v) * 1);
    };
  });
  for (int step = 0; step < 4; ++step) {
    model.run(1, [&](base::Microbatch) { model.call(parent, at::full({3}, step)); });
  }
  for (int i = 0; i < 8; ++i) EXPECT_EQ(stash.at(i)[0].item<double>(), 2 * (i / 2));
}

TEST(ReferenceLifetimes, AReferenceOfAStepThatFailedSaysSo) {
  Model model(2, "simple");
  const auto module = model.add_function("module", 1, [](const at::Tensor& x) { return x * 2; });
  at::Tensor kept;
  const auto body = [&](base::Microbatch) { kept = model.call(module, at::ones({3})); };
  model.run(1, body);
  const auto outcomes = model.attempt(1, [&](base::Microbatch microbatch) {
    body(microbatch);
    throw std::runtime_error("on purpose");
  });
  EXPECT_EQ(message_of(outcomes[0].error), "on purpose");
  for (int i = 0; i < 2; ++i) {
    try {
      kept.sum();
      EXPECT_FALSE(is_pending(kept));  // it may have been here already
    } catch (const base::UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("module on rank 1"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("did not end well"), std::string::npos) << error.what();
    }
  }
  model.run(1, body);
}

TEST(ReferenceLifetimes, AReaderWhoseStepEndsUnderItsHandsIsToldInTheNextStepWhatBecameOfTheValue) {
  Model model(2, "simple");
  Gate gate;
  std::atomic<bool> fails = false;
  const auto module = model.add_function("module", 1, [&](const at::Tensor& x) {
    gate.pass();
    return x * 2;
  });
  at::Tensor kept;
  std::string first;
  const auto body = [&](base::Microbatch microbatch) {
    if (fails && microbatch.value == 1) throw std::runtime_error("on purpose");
    if (microbatch.value == 1) return;
    kept = model.call(module, at::ones({3}));
    if (!fails) return;
    try {
      kept.sum();  // gives the slot to the microbatch that fails
    } catch (...) {
      gate.open();
      throw;
    }
  };
  model.run(2, body);
  fails = true;
  gate.shut();
  for (const auto& outcome : model.attempt(2, body)) {
    EXPECT_NE(message_of(outcome.error).find("on purpose"), std::string::npos) << message_of(outcome.error);
  }
  EXPECT_THROW(kept.sum(), base::UsageError);
}

TEST(ReferenceLifetimes, AReferenceMayBeReadInAnotherThreadAndAfterItsJob) {
  at::Tensor read, unread;
  {
    Model model(2, "simple");
    const auto module = model.add_function("module", 1, [](const at::Tensor& x) { return x * 2; });
    for (int step = 0; step < 2; ++step) {
      model.run(1, [&](base::Microbatch) {
        const auto y = model.call(module, at::ones({3}));
        std::thread([&] { EXPECT_EQ(y.sum().item<float>(), 6); }).join();
        read = model.call(module, at::ones({3}));
      });
    }
    model.attempt(1, [&](base::Microbatch) {
      unread = model.call(module, at::ones({3}));
      throw std::runtime_error("on purpose");
    });
  }
  EXPECT_EQ(read.sum().item<float>(), 6);
  if (is_pending(unread)) {
    EXPECT_THROW(unread.sum(), base::UsageError);
  }
}

}  // namespace
}  // namespace lamina::pipeline
