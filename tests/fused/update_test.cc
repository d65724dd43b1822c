// SPDX-License-Identifier: Apache-2.0
#include "lamina/fused/update.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "lamina/layout/half.h"
#include "tests/fused/references.h"

namespace lamina::fused {
namespace {

using layout::BFloat16;
using layout::DType;
using layout::Float16;

const std::vector<std::size_t> kSizes{0, 1, 7, 64, 1000, 3 * kBlock + 17};

Values normal(std::size_t count, std::mt19937& random) {
  std::normal_distribution<double> draw;
  Values values(count);
  for (double& value : values) value = draw(random);
  return values;
}

// Numbers in memory, in one of the types.
class Memory {
 public:
  Memory() = default;
  Memory(DType dtype, const Values& values) : dtype_(dtype), count_(values.size()) {
    bytes_.resize(count_ * static_cast<std::size_t>(traits(dtype).size_bytes));
    for (std::size_t i = 0; i < count_; ++i) set(i, values[i]);
  }

  DType dtype() const { return dtype_; }
  void* data(std::size_t begin = 0) {
    return bytes_.data() + begin * static_cast<std::size_t>(traits(dtype_).size_bytes);
  }

  Values values() const {
    Values values;
    for (std::size_t i = 0; i < count_; ++i) values.push_back(get(i));
    return values;
  }

  bool operator==(const Memory&) const = default;

 private:
  template <class T>
  T& at(std::size_t i) const {
    return reinterpret_cast<T*>(const_cast<std::byte*>(bytes_.data()))[i];
  }
  void set(std::size_t i, double value) {
    if (dtype_ == DType::kFloat64) at<double>(i) = value;
    if (dtype_ == DType::kFloat32) at<float>(i) = static_cast<float>(value);
    if (dtype_ == DType::kFloat16) at<std::uint16_t>(i) = Float16::narrow(static_cast<float>(value));
    if (dtype_ == DType::kBFloat16) at<std::uint16_t>(i) = BFloat16::narrow(static_cast<float>(value));
  }
  double get(std::size_t i) const {
    if (dtype_ == DType::kFloat64) return at<double>(i);
    if (dtype_ == DType::kFloat32) return at<float>(i);
    return dtype_ == DType::kFloat16 ? Float16::widen(at<std::uint16_t>(i)) : BFloat16::widen(at<std::uint16_t>(i));
  }

  DType dtype_ = DType::kFloat32;
  std::size_t count_ = 0;
  std::vector<std::byte> bytes_;
};

// A parameter with its states, updated whole or in parts.
struct Parameter {
  Parameter(const Sample& sample, DType dtype, const Values& values) : value(dtype, values) {
    const auto hyper = hyper_of(sample);
    for (const auto& field : sample.rule->declaration.states) {
      if (field.kind != StateKind::kLikeParameter) continue;
      const auto initial = hyper_index(sample.rule->declaration, field.initial);
      states.emplace_back(dtype, Values(values.size(), initial < hyper.size() ? hyper[initial] : 0));
    }
  }

  Part part(std::size_t begin, std::size_t end) {
    Part part{.count = end - begin, .dtype = value.dtype(), .parameter = value.data(begin), .first = first};
    part.numbers = numbers;
    for (std::size_t k = 0; k < states.size(); ++k) part.states[k] = states[k].data(begin);
    return part;
  }

  Memory value;
  std::vector<Memory> states;
  Numbers numbers{};
  bool first = true;

  bool operator==(const Parameter&) const = default;
};

double norm(const Values& x) { return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0)); }

// Parameters of the sizes of kSizes in training, in some way of dividing the work.
struct Training {
  Sample sample;
  DType dtype = DType::kFloat32;
  DType gradient_dtype = DType::kFloat32;
  double scale = 1;
  int steps = 50;
  int threads = 1;
  std::size_t chunk = 16 * kBlock;
  Vectors vectors = widest_vectors();
  std::vector<std::size_t> cuts = {};  // of the last parameter, each part updated by itself
  DType copy_dtype = DType::kBFloat16;
  bool copies = false;

  std::vector<Parameter> parameters = {};
  std::vector<Values> expected = {};  // by the reference
  std::vector<Memory> copy = {};

  void run() {
    std::mt19937 random(7);
    Threads pool(threads);
    const Workers workers{pool, chunk, vectors};
    const auto hyper = hyper_of(sample);
    check(*sample.rule, hyper);
    std::vector<Reference> references;
    for (const std::size_t size : kSizes) {
      parameters.emplace_back(sample, dtype, normal(size, random));
      expected.push_back(parameters.back().value.values());
      references.push_back(reference_of(sample));
      copy.emplace_back(copy_dtype, expected.back());
    }
    for (int i = 0; i < steps; ++i) {
      std::vector<Memory> gradients;
      Values all;
      for (const std::size_t size : kSizes) {
        gradients.emplace_back(gradient_dtype, normal(size, random));
        for (const double value : gradients.back().values()) all.push_back(value * scale);
      }
      const Call call{*sample.rule, hyper, scale, norm(all)};
      step(call, gradients, workers);
      for (std::size_t k = 0; k < kSizes.size(); ++k) {
        references[k].gradient_norm = call.gradient_norm;
        Values gradient = gradients[k].values();
        for (double& value : gradient) value *= scale;
        references[k].step(sample.rule->declaration.name, expected[k], gradient);
      }
    }
  }

 private:
  void step(const Call& call, std::vector<Memory>& gradients, const Workers& workers) {
    std::vector<Part> parts;
    for (std::size_t k = 0; k < kSizes.size(); ++k) {
      std::vector<std::size_t> bounds{0};
      if (k + 1 == kSizes.size()) bounds.insert(bounds.end(), cuts.begin(), cuts.end());
      bounds.push_back(kSizes[k]);
      for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
        Part& part = parts.emplace_back(parameters[k].part(bounds[i], bounds[i + 1]));
        part.gradient_dtype = gradient_dtype;
        part.gradient = gradients[k].data(bounds[i]);
        part.copy_dtype = copy_dtype;
        if (copies) part.copy = copy[k].data(bounds[i]);
      }
    }
    measure(call, parts, workers);
    const auto combine = call.rule.declaration.norms;
    Norms whole{};
    const std::size_t last = kSizes.size() - 1;
    for (std::size_t i = last; i < parts.size(); ++i) {
      for (std::size_t k = 0; k < combine.size(); ++k) whole[k] = combined(combine[k], whole[k], parts[i].norms[k]);
    }
    for (std::size_t i = last; i < parts.size(); ++i) parts[i].norms = whole;
    update(call, parts, workers);
    for (std::size_t k = 0; k < kSizes.size(); ++k) {
      parameters[k].numbers = parts[k].numbers;
      parameters[k].first = false;
    }
  }
};

double largest_difference(const Values& a, const Values& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(a[i] - b[i]);
    largest = difference > largest || std::isnan(difference) ? difference : largest;
  }
  return largest;
}

class Rules : public ::testing::TestWithParam<Sample> {
 protected:
  static Training trained(Training training) {
    training.run();
    return training;
  }
  static void expect_near(const Training& training, double tolerance) {
    for (std::size_t k = 0; k < kSizes.size(); ++k) {
      EXPECT_LE(largest_difference(training.parameters[k].value.values(), training.expected[k]), tolerance)
          << kSizes[k] << " elements";
    }
  }
};

TEST_P(Rules, AreTheirDefinitionInDouble) {
  expect_near(trained({.sample = GetParam(), .dtype = DType::kFloat64, .gradient_dtype = DType::kFloat64}), 1e-11);
}

// Differences of 50 roundings of numbers of about 1.
TEST_P(Rules, AreTheirDefinitionInFloat) { expect_near(trained({.sample = GetParam()}), 2e-5); }

TEST_P(Rules, ScaleGradientsFirst) { expect_near(trained({.sample = GetParam(), .scale = 0.125}), 2e-5); }

TEST_P(Rules, GiveTheSameBitsWithAnyThreadsChunksAndVectors) {
  const auto expected = trained({.sample = GetParam(), .steps = 5}).parameters;
  EXPECT_EQ(trained({.sample = GetParam(), .steps = 5, .threads = 2, .chunk = kBlock}).parameters, expected);
  EXPECT_EQ(trained({.sample = GetParam(), .steps = 5, .threads = 7, .chunk = 2 * kBlock}).parameters, expected);
  for (const auto vectors : {Vectors::kBaseline, Vectors::kAvx2}) {
    if (vectors > widest_vectors()) continue;
    EXPECT_EQ(trained({.sample = GetParam(), .steps = 5, .vectors = vectors}).parameters, expected);
  }
}

// Sums of other parts differ in the last bit of a double.
TEST_P(Rules, UpdatePartsAsTheWhole) {
  const auto whole = trained({.sample = GetParam()});
  const auto cut = trained({.sample = GetParam(), .cuts = {1, 100, kBlock + 5, 3 * kBlock}});
  const double tolerance = GetParam().rule->declaration.needs == Needs::kElements ? 0 : 1e-6;
  for (std::size_t k = 0; k < kSizes.size(); ++k) {
    EXPECT_LE(largest_difference(cut.parameters[k].value.values(), whole.parameters[k].value.values()), tolerance);
  }
}

TEST_P(Rules, WriteHalfPrecisionCopiesOfMasters) {
  for (const auto dtype : {DType::kBFloat16, DType::kFloat16}) {
    const auto training =
        trained({.sample = GetParam(), .gradient_dtype = dtype, .scale = 0.125, .copy_dtype = dtype, .copies = true});
    expect_near(training, 2e-5);
    for (std::size_t k = 0; k < kSizes.size(); ++k) {
      EXPECT_EQ(training.copy[k], Memory(dtype, training.parameters[k].value.values()));
    }
  }
}

// Parameters and states of 16 bits are rounded in every step, to 8 or 11 bits: a step of lr may be lost.
TEST_P(Rules, UpdateHalfPrecisionParametersToTheirPrecision) {
  const Sample& sample = GetParam();
  for (const auto dtype : {DType::kBFloat16, DType::kFloat16}) {
    const auto training =
        trained({.sample = sample, .dtype = dtype, .gradient_dtype = dtype, .steps = 5, .chunk = kBlock});
    const auto again = trained({.sample = sample, .dtype = dtype, .gradient_dtype = dtype, .steps = 5, .threads = 2});
    EXPECT_EQ(training.parameters, again.parameters);
    Parameter once(sample, dtype, Values(1, 0.5));
    Memory gradient(dtype, Values(1, 0.25));
    Part part = once.part(0, 1);
    part.gradient = gradient.data();
    part.gradient_dtype = dtype;
    Threads threads(1);
    const auto hyper = hyper_of(sample);
    measure({*sample.rule, hyper, 1, 0.25}, {&part, 1}, {threads});
    update({*sample.rule, hyper, 1, 0.25}, {&part, 1}, {threads});
    auto reference = reference_of(sample);
    reference.gradient_norm = 0.25;
    Values expected{0.5};
    reference.step(sample.rule->declaration.name, expected, {0.25});
    // Averages are rounded before they are used.
    EXPECT_NEAR(once.value.values()[0], expected[0], dtype == DType::kBFloat16 ? 4e-3 : 5e-4);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Rules, ::testing::ValuesIn(samples()),
                         [](const auto& info) { return info.param.rule->declaration.name + info.param.label; });

TEST(Update, LetsInfinitiesAndNanThrough) {
  Sample sample{&kLamb, "", {}};
  Parameter parameter(sample, DType::kFloat32, Values(3, 1));
  Memory gradient(DType::kFloat32, {1, INFINITY, NAN});
  Part part = parameter.part(0, 3);
  part.gradient = gradient.data();
  part.gradient_dtype = DType::kFloat32;
  Threads threads(1);
  measure({kGradientNorm, {}}, {&part, 1}, {threads});
  EXPECT_TRUE(std::isnan(part.norms[0]));
  const auto hyper = hyper_of(sample);
  measure({kLamb, hyper, 1, NAN}, {&part, 1}, {threads});
  update({kLamb, hyper, 1, NAN}, {&part, 1}, {threads});
  EXPECT_TRUE(std::isnan(parameter.value.values()[0]));
}

TEST(Update, FindsTheLargestGradientAlsoIfItIsNegativeOrNan) {
  Sample sample{&kNovoGrad, "", {{"norm_type", 0}}};
  const auto hyper = hyper_of(sample);
  Threads threads(1);
  const auto largest = [&](const Values& values) {
    Memory gradient(DType::kFloat32, values);
    Parameter parameter(sample, DType::kFloat32, Values(values.size()));
    Part part = parameter.part(0, values.size());
    part.gradient = gradient.data();
    part.gradient_dtype = DType::kFloat32;
    measure({kNovoGrad, hyper}, {&part, 1}, {threads});
    return part.norms[1];
  };
  EXPECT_EQ(largest({1, -5, 3}), 5);
  EXPECT_EQ(largest({}), 0);
  Values many(3000, 0.5);
  many[2999] = -7;
  EXPECT_EQ(largest(many), 7);
  many[5] = NAN;
  EXPECT_TRUE(std::isnan(largest(many)));
}

}  // namespace
}  // namespace lamina::fused
