// SPDX-License-Identifier: Apache-2.0
// Notes that a face leaves in an answer for the face of the caller, and news that it sends with a request.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>

#include "lamina/runtime/execution_context.h"
#include "lamina/value/reference_tensor.h"
#include "tests/pipeline/pipeline_fixture.h"

namespace lamina::pipeline {
namespace {

TEST(Notes, ComeWithTheAnswerOfACallThatIsWaitedForAndByTheEndOfAStepWithAllOthersEachOnce) {
  Pipeline pipeline(2, "simple");
  int calls = 0;
  const auto leaves = pipeline.add("leaves", 1, [&](Job&) {
    return [&](value::Value x) {
      runtime::ExecutionContext::current()->leave_note("note " + std::to_string(calls++));
      return value::Value(x.as<at::Tensor>() * 2);
    };
  });
  std::vector<std::string> waited_for;
  const auto body = [&](base::Microbatch) {
    auto& job = pipeline.job(0);
    job.call(leaves, at::ones({2}));
    waited_for = job.take_notes();
    const auto predicted = job.call(leaves, at::ones({2}));
    return value::Value(predicted.as<at::Tensor>().sum());
  };
  for (const auto& outcome : pipeline.step(1, body)) EXPECT_EQ(message_of(outcome.error), "");
  EXPECT_EQ(waited_for, std::vector<std::string>{"note 0"});
  EXPECT_EQ(pipeline.job(0).take_notes(), std::vector<std::string>{"note 1"});
  EXPECT_TRUE(pipeline.job(0).take_notes().empty() && pipeline.job(1).take_notes().empty());
}

TEST(Notes, ReachTheCallerBeforeTheAnswersOfCallsThatComputeLater) {
  Pipeline pipeline(2, "simple");
  std::atomic<int> calls = 0;
  const auto leaves = pipeline.add("leaves", 1, [&](Job&) {
    return [&](value::Value x) {
      if (calls++ == 0) runtime::ExecutionContext::current()->leave_note("note");
      return value::Value(x.as<at::Tensor>() * 2);
    };
  });
  std::promise<void> overtaken;
  auto is_overtaken = overtaken.get_future();
  std::atomic<bool> noted = false, is_late = false;
  pipeline.traffic().before = [&](const transport::Message& message) {
    if (message.kind != remote::kResult) return;
    if (!remote::to_answer(transport::Message(message)).note.empty()) {
      noted = true;
      is_late = is_overtaken.wait_for(std::chrono::milliseconds(300)) == std::future_status::ready;
      noted = false;
    } else if (noted.exchange(false)) {
      overtaken.set_value();
    }
  };
  const auto body = [&](base::Microbatch) { return pipeline.job(0).call(leaves, at::ones({2})); };
  for (const auto& outcome : pipeline.step(2, body)) EXPECT_EQ(message_of(outcome.error), "");
  EXPECT_FALSE(is_late);
  EXPECT_EQ(pipeline.job(0).take_notes(), std::vector<std::string>{"note"});
}

TEST(Notes, ComeWithAnErrorToo) {
  Pipeline pipeline(2, "simple");
  const auto raises = pipeline.add("raises", 1, [](Job&) {
    return [](value::Value) -> value::Value {
      runtime::ExecutionContext::current()->leave_note("before");
      throw std::runtime_error("no");
    };
  });
  const auto body = [&](base::Microbatch) { return pipeline.job(0).call(raises, at::ones({2})); };
  for (const auto& outcome : pipeline.step(1, body)) EXPECT_NE(message_of(outcome.error), "");
  EXPECT_EQ(pipeline.job(0).take_notes(), std::vector<std::string>{"before"});
}

// Functions whose caller has news each time.
class Telling : public model::Functions {
 public:
  std::vector<std::string> heard;

  model::CallerState capture_state(base::ModuleId) override { return {"", "news " + std::to_string(told_++)}; }
  void hear(const std::string& news) override { heard.push_back(news); }

 private:
  int told_ = 0;
};

TEST(News, ComeWithACallThatIsPredictedFromOneThatHadOthers) {
  Pipeline pipeline(2, "simple");
  std::vector<std::shared_ptr<Telling>> modules;
  base::ModuleId doubles;
  for (int rank = 0; rank < pipeline.size(); ++rank) {
    modules.push_back(std::make_shared<Telling>());
    doubles = modules.back()->add("doubles", [](value::Value x) { return value::Value(x.as<at::Tensor>() * 2); });
    pipeline.job(rank).set_model(modules.back(), {base::Rank(1)});
  }
  std::vector<bool> predicted;
  const auto body = [&](base::Microbatch) {
    for (int call = 0; call < 3; ++call) {
      const auto y = pipeline.job(0).call(doubles, at::ones({2}));
      predicted.push_back(value::is_pending(y.as<at::Tensor>()));
      y.as<at::Tensor>().sum();  // its owner has heard by then
    }
    return value::Value();
  };
  for (const auto& outcome : pipeline.step(1, body)) EXPECT_EQ(message_of(outcome.error), "");
  EXPECT_EQ(predicted, (std::vector<bool>{false, true, true}));
  EXPECT_EQ(modules[1]->heard, (std::vector<std::string>{"news 0", "news 1", "news 2"}));
  EXPECT_TRUE(modules[0]->heard.empty());
}

}  // namespace
}  // namespace lamina::pipeline
