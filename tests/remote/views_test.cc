// SPDX-License-Identifier: Apache-2.0
// Modules that return views of their arguments: what is written to one of them is in the other, as in one process.
#include <torch/csrc/autograd/custom_function.h>

#include "tests/pipeline/reference_fixture.h"

namespace lamina::remote {
namespace {

using pipeline::leaf;
using pipeline::message_of;
using pipeline::Model;
using value::is_pending;

class ViewSchedules : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, ViewSchedules, testing::Values("simple", "interleaved"));

at::Tensor front(const at::Tensor& x) { return x.narrow(0, 0, 2); }

struct Reversed : torch::autograd::Function<Reversed> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.view_as(x); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {-gradients[0]};
  }
};

// Calls `body(h of leaf)` of each microbatch for a few steps, with the functions plain and as those of other ranks, and
// compares values and gradients. `makes` computes what is viewed.
using Function = Model::Function;
void compare(const std::string& schedule, const Function& views, const Function& makes,
             const std::function<at::Tensor(const at::Tensor& x, const Function& views, const Function& makes)>& body) {
  Model model(3, schedule);
  const auto viewer = model.add_function("viewer", 1, views), maker = model.add_function("maker", 2, makes);
  const Function call_views = [&](const at::Tensor& x) { return model.call(viewer, x); };
  const Function call_makes = [&](const at::Tensor& x) { return model.call(maker, x); };
  const auto plain = leaf(2), ours = leaf(2);
  const auto expected = body(plain, views, makes);
  for (int i = 0; i < 4; ++i) expected.backward({}, /*retain_graph=*/true);
  for (int step = 0; step < 3; ++step) {
    ours.mutable_grad().reset();
    model.run(4, [&](base::Microbatch) {
      const auto loss = body(ours, call_views, call_makes);
      EXPECT_TRUE(at::equal(loss, expected)) << loss << expected;
      model.backward(loss);
    });
    EXPECT_TRUE(at::equal(ours.grad(), plain.grad())) << ours.grad() << plain.grad();
  }
}

TEST_P(ViewSchedules, AViewOfWhatIsHereIsWritten) {
  compare(GetParam(), front, front, [](const auto& x, const auto& views, const auto&) {
    const auto h = x * 1.5;
    views(h).mul_(2);
    return (h * h).sum();
  });
}

TEST_P(ViewSchedules, AnArgumentIsWrittenAfterItsViewWasReturned) {
  compare(GetParam(), front, front, [](const auto& x, const auto& views, const auto&) {
    const auto h = x * 1.5;
    const auto view = views(h);
    h.mul_(2);
    return view.sum() + (view * h.sum()).sum();
  });
}

TEST_P(ViewSchedules, AViewOfWhatIsOnAThirdRankIsWritten) {
  compare(
      GetParam(), front, [](const at::Tensor& x) { return x * 1.5; },
      [](const auto& x, const auto& views, const auto& makes) {
        const auto h = makes(x);
        views(h).mul_(2);
        return (h * h).sum();
      });
}

TEST_P(ViewSchedules, AViewWithAGradientOfItsOwnKeepsIt) {
  compare(
      GetParam(), [](const at::Tensor& x) { return Reversed::apply(x); }, [](const at::Tensor& x) { return x * 1.5; },
      [](const auto& x, const auto& views, const auto& makes) {
        return (views(x * 1.5) * 2).sum() + (views(makes(x)) * 3).sum();
      });
}

TEST_P(ViewSchedules, ADetachedViewHasNoGradientAndSharesMemory) {
  compare(
      GetParam(), [](const at::Tensor& x) { return front(x.detach()); }, front,
      [](const auto& x, const auto& views, const auto&) {
        const auto h = x * 1.5;
        const auto view = views(h);
        EXPECT_FALSE(view.requires_grad());
        view.mul_(2);
        return h.sum() + view.sum();
      });
}

TEST_P(ViewSchedules, AViewThatNobodyWritesIsNotFetched) {
  Model model(3, GetParam());
  const auto viewer = model.add_function("viewer", 1, front);
  const auto maker = model.add_function("maker", 2, [](const at::Tensor& x) { return x * 1.5; });
  for (int step = 0; step < 3; ++step) {
    const int microbatches = step == 0 ? 1 : 2;  // a second one may come after the first has taught what the view is
    model.run(microbatches, [&](base::Microbatch) {
      const auto h = model.call(maker, leaf(2));
      const auto view = model.call(viewer, h);
      EXPECT_EQ(is_pending(view), step > 0);
      model.backward(model.call(maker, view).sum());
    });
  }
}

TEST_P(ViewSchedules, AWriteThatEarlierCallsDidNotAnnounceIsAnError) {
  Model model(3, GetParam());
  const auto viewer = model.add_function("viewer", 1, front);
  const auto maker = model.add_function("maker", 2, [](const at::Tensor& x) { return x * 1.5; });
  for (int step = 0; step < 2; ++step) {
    const auto outcomes = model.attempt(1, [&](base::Microbatch) {
      const auto view = model.call(viewer, model.call(maker, leaf(2)));
      if (step == 1) view.mul_(2);
    });
    const auto message = message_of(outcomes[0].error);
    EXPECT_EQ(message.find("a result of viewer, which lives on another rank, is a view of its argument"),
              step == 0 ? std::string::npos : 0);
  }
}

}  // namespace
}  // namespace lamina::remote
