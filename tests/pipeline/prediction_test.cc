// SPDX-License-Identifier: Apache-2.0
// Results that a call is taken to return, and what happens when it returns something else.
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <set>

#include "tests/pipeline/reference_fixture.h"
#include "tests/value/sent.h"

namespace lamina::pipeline {
namespace {

using value::is_pending;
using value::List;
using value::Value;

TEST(Prediction, KnowsContainersNoneAliasesAndArgumentsThatAreHandedBack) {
  Model model(2, "simple");
  const auto module = model.add("module", 1, [](Job&) {
    return [](Value v) {
      const auto y = tensor_in(v) * 2;
      value::Dict dict;
      dict.items.emplace_back(Value(std::string("y")), Value(y));
      return Value(value::Tuple{{value::None(), y, tensor_in(v), List{{y.t()}}, dict}});
    };
  });
  for (int step = 0; step < 3; ++step) {
    model.run(1, [&](base::Microbatch) {
      const auto x = at::ones({2, 3});
      const auto outputs = model.job(0).call(module, x);
      const auto& items = outputs.as<value::Tuple>().items;
      EXPECT_TRUE(items[0].get_if<value::None>() != nullptr);
      const auto y = tensor_in(items[1]);
      EXPECT_EQ(is_pending(y), step > 0);
      EXPECT_TRUE(tensor_in(items[2]).is_same(x));
      EXPECT_TRUE(tensor_in(items[4].as<value::Dict>().items[0].second).is_same(y));
      const auto transposed = value::tensor_at(items[3], 0);
      EXPECT_EQ(transposed.strides(), at::IntArrayRef({1, 3}));
      EXPECT_TRUE(at::equal(transposed, at::full({3, 2}, 2)));
    });
  }
}

TEST(Prediction, ACallWithAnyOtherLeafInItsOutputsIsWaitedFor) {
  Model model(2, "simple");
  int calls = 0;
  const auto module = model.add("module", 1, [&](Job&) {
    return [&](Value v) { return Value(List{{tensor_in(v), tensor_in(v) * 2, std::int64_t{++calls}}}); };
  });
  for (int step = 1; step < 4; ++step) {
    model.run(1, [&](base::Microbatch) {
      const auto outputs = model.job(0).call(module, at::ones({2}));
      EXPECT_FALSE(is_pending(value::tensor_at(outputs, 1)));
      EXPECT_EQ(outputs.as<List>().items[2].as<std::int64_t>(), step);
    });
  }
}

struct Reader {
  const char* name;
  std::function<at::Tensor(const at::Tensor&)> read;
};

// Each returns what depends on how many ones are in x.
const Reader kReaders[] = {
    {"nonzero", [](const at::Tensor& x) { return at::nonzero(x); }},
    {"item", [](const at::Tensor& x) { return at::ones({x.sum().item<std::int64_t>()}); }},
    {"masked_select", [](const at::Tensor& x) { return x.masked_select(x > 0); }},
    {"boolean index", [](const at::Tensor& x) { return x.index({x > 0}); }},
    {"unique", [](const at::Tensor& x) { return std::get<0>(at::_unique(x.cumsum(0))); }},
    {"tensor_split", [](const at::Tensor& x) { return x.tensor_split(x.sum().to(at::kLong).view({1}))[0]; }},
    {"pack_padded",
     [](const at::Tensor& x) {
       return std::get<0>(at::_pack_padded_sequence(x.view({-1, 1, 1}), x.sum().to(at::kLong).view({1}), false));
     }},
};

TEST(Prediction, AShapeThatDependsOnDataIsNeverPredictedThoughANestedCallReadsIt) {
  for (const auto& [name, read] : kReaders) {
    Model model(3, "simple");
    const auto inner = model.add_function("inner", 2, read);
    const auto outer = model.add("outer", 1, [inner](Job& job) {
      return [&job, inner](Value v) { return Value(tensor_in(job.call(inner, v)) * 2); };
    });
    for (int ones = 1; ones < 4; ++ones) {
      model.run(1, [&](base::Microbatch) {
        const auto x = at::zeros({4});
        x.slice(0, 0, ones).fill_(1);
        const auto direct = model.call(inner, x), nested = model.call(outer, x);
        EXPECT_FALSE(is_pending(direct)) << name;
        EXPECT_FALSE(is_pending(nested)) << name;
        EXPECT_TRUE(at::equal(direct, read(x))) << name;
        EXPECT_TRUE(at::equal(nested, read(x) * 2)) << name;
      });
    }
  }
}

TEST(Prediction, ThatIsWrongIsAnErrorThatNamesTheModuleAndTheRemedyAndTheJobGoesOn) {
  for (const auto* what : {"shape", "dtype", "strides", "tree", "write"}) {
    Model model(3, "simple");
    int calls = 0;
    const std::string kind = what;
    const auto fickle = model.add("blocks.fickle", 1, [&](Job&) {
      return [&](Value v) -> Value {
        const auto x = tensor_in(v);
        if (++calls != 2) return x * 2;
        if (kind == "shape") return x.slice(0, 1) * 2;
        if (kind == "dtype") return (x * 2).to(at::kFloat);
        if (kind == "strides") return (x * 2).t().contiguous().t();
        if (kind == "tree") return List{{x * 2}};
        return x.mul_(2) * 1;
      };
    });
    const auto reader = model.add_function("reader", 2, [](const at::Tensor& x) { return x + 1; });
    for (const bool passed_on : {false, true}) {
      calls = passed_on ? 1 : 0;
      for (int step = passed_on ? 1 : 0; step < 3; ++step) {
        const auto outcomes = model.attempt(1, [&](base::Microbatch) {
          const auto y = model.call(fickle, at::ones({2, 3}, at::kDouble));
          EXPECT_EQ((passed_on ? model.call(reader, y) : y + 1).sum().item<double>(), 18);
        });
        for (const auto& outcome : outcomes) {
          const auto message = message_of(outcome.error);
          EXPECT_EQ(message.find("blocks.fickle") != std::string::npos, step == 1) << what << message;
          EXPECT_EQ(message.find("set_dynamic") != std::string::npos, step == 1) << what << message;
        }
      }
    }
  }
}

TEST(Prediction, OfGradientsThatIsWrongIsAnErrorToo) {
  Model model(3, "simple");
  const auto weight = leaf(2);
  bool uses_second = true;
  const auto fickle = model.add("fickle", 1, [&](Job&) {
    return [&](Value v) {
      const auto a = value::tensor_at(v, 0), b = value::tensor_at(v, 1);
      return Value(uses_second ? a * b * weight : a * b.detach() * weight);
    };
  });
  for (int step = 0; step < 4; ++step) {
    uses_second = step != 2;
    const auto a = leaf(3), b = leaf(5);
    const auto outcomes = model.attempt(
        1, [&](base::Microbatch) { model.backward(tensor_in(model.job(0).call(fickle, List{{a * 1, b * 1}})).sum()); });
    for (const auto& outcome : outcomes) {
      const auto message = message_of(outcome.error);
      EXPECT_EQ(message.find("fickle") != std::string::npos, step == 2) << message;
      EXPECT_EQ(message.find("set_dynamic") != std::string::npos, step == 2) << message;
    }
    EXPECT_TRUE(step == 2 || at::equal(b.grad(), at::full({3}, 6.0, at::kDouble)));
  }
}

TEST(Prediction, GradAndInferenceModeAndWhatRequiresGradMakeAnotherKindOfCall) {
  Model model(2, "simple");
  const auto module = model.add_scaling("module", 1, leaf(2));
  const auto x = leaf(1);
  const auto body = [&](base::Microbatch) {
    EXPECT_TRUE(model.call(module, x).requires_grad());
    EXPECT_TRUE(model.call(module, x.detach()).requires_grad());
    {
      const at::NoGradGuard no_grad;
      EXPECT_FALSE(model.call(module, x).requires_grad());
    }
    const c10::InferenceMode inference;
    const auto y = model.call(module, x);
    EXPECT_FALSE(y.requires_grad());
    EXPECT_EQ(y.sum().item<double>(), 6);
  };
  for (int step = 0; step < 3; ++step) model.run(1, body);
}

TEST(Prediction, MoreKindsOfCallsThanAreRememberedAreServedAllTheSame) {
  Model model(2, "simple");
  const auto module = model.add("module", 1, [](Job&) {
    return [](Value v) { return Value(at::full({2}, v.as<List>().items[0].as<std::int64_t>())); };
  });
  for (int step = 0; step < 2; ++step) {
    model.run(1, [&](base::Microbatch) {
      std::vector<at::Tensor> results;
      for (std::int64_t i = 0; i < 5000; ++i) results.push_back(tensor_in(model.job(0).call(module, List{{i}})));
      for (std::int64_t i = 0; i < 5000; ++i) ASSERT_EQ(results[i][0].item<std::int64_t>(), i);
    });
  }
}

}  // namespace
}  // namespace lamina::pipeline
