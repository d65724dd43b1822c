// SPDX-License-Identifier: Apache-2.0
// Trees: every kind of value, and any tree of them.
#include "lamina/value/encoding.h"

#include <ATen/ops/arange.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <bit>
#include <limits>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "tests/value/sent.h"

namespace lamina::value {
namespace {

// Text of what a tree holds: floats by their bits, tensors by what a receiver can see of them.
class Description {
 public:
  explicit Description(const Value& tree) { add(tree); }
  const std::string& text() const { return text_; }

 private:
  void add(const Value& tree) {
    text_ += tree.kind();
    std::visit([this](const auto& held) { add_held(held); }, tree.variant());
    text_ += ";";
  }
  void add_held(None) {}
  void add_held(bool flag) { text_ += flag ? "yes" : "no"; }
  void add_held(std::int64_t number) { text_ += std::to_string(number); }
  void add_held(double number) { text_ += std::to_string(std::bit_cast<std::uint64_t>(number)); }
  void add_held(const std::string& text) { text_ += std::to_string(text.size()) + ":" + text; }
  void add_held(const at::Tensor& tensor) {
    text_ += tensor.defined() ? base::str(tensor.sizes(), tensor.scalar_type(), tensor.requires_grad(), tensor.sum())
                              : "undefined";
  }
  void add_held(const Reference& r) {
    text_ += base::str(r.name.origin, ",", r.name.step, ",", r.name.microbatch, ",", r.name.counter, ",", r.argument,
                       ",", r.requires_grad);
  }
  void add_held(at::ScalarType dtype) { text_ += base::str(dtype); }
  void add_held(at::Device device) { text_ += device.str(); }
  void add_held(const Slice& slice) { add_all(slice.bounds); }
  void add_held(const List& list) { add_all(list.items); }
  void add_held(const Tuple& tuple) { add_all(tuple.items); }
  void add_held(const Dict& dict) {
    for (const auto& [key, item] : dict.items) {
      add(key);
      add(item);
    }
  }
  void add_held(const Opaque& opaque) {
    add_held(opaque.codec);
    add_held(opaque.bytes);
    for (const auto& tensor : opaque.tensors) add_held(tensor);
  }
  void add_all(const std::vector<Value>& items) {
    for (const auto& item : items) add(item);
  }

  std::string text_;
};

std::string text_of(const Value& tree) { return Description(tree).text(); }

const Reference kReference{{base::Rank(3), base::Step(1), base::Microbatch(2), 7}, 5, true};

TEST(Encoding, EveryKindOfValueArrivesAsItWas) {
  const std::string all_bytes("\0\xff\n text", 8);
  const std::vector<Value> values = {
      None{},
      true,
      false,
      std::numeric_limits<std::int64_t>::min(),
      std::int64_t{-1},
      -0.0,
      std::numeric_limits<double>::quiet_NaN(),
      std::numeric_limits<double>::infinity(),
      "",
      all_bytes,
      at::arange(3),
      at::Tensor(),
      kReference,
      at::kBFloat16,
      at::Device(at::kCPU),
      at::Device(at::kCPU),
      Slice{{None{}, std::int64_t{4}, std::int64_t{-1}}},
      List{},
      Tuple{},
      Dict{},
      List{{true, "x"}},
      Tuple{{None{}}},
      Dict{{{"key", std::int64_t{1}}, {Tuple{{1.5, at::kLong}}, List{}}}},
      Opaque{"pickle", all_bytes, {at::arange(2), at::Tensor()}},
  };
  for (const auto& value : values) EXPECT_EQ(text_of(sent(value)), text_of(value));
  EXPECT_EQ(text_of(sent(List{values})), text_of(List{values}));
}

TEST(Encoding, ADictKeepsItsOrder) {
  const auto arrived = sent(Dict{{{"z", 1.0}, {"a", 2.0}, {"m", 3.0}}});
  const auto& items = arrived.as<Dict>().items;
  EXPECT_EQ(items[0].first.as<std::string>() + items[1].first.as<std::string>(), "za");
}

Value any_value(int depth, const std::vector<at::Tensor>& tensors) {
  const auto some = [&](auto make) {
    std::vector<decltype(make())> made;
    for (int left = *rc::gen::inRange(0, 4); left > 0; --left) made.push_back(make());
    return made;
  };
  const auto tensor = [&] { return *rc::gen::elementOf(tensors); };
  const auto child = [&] { return any_value(depth - 1, tensors); };
  switch (*rc::gen::inRange(0, depth > 0 ? 13 : 9)) {
    case 0:
      return None{};
    case 1:
      return *rc::gen::arbitrary<bool>();
    case 2:
      return *rc::gen::arbitrary<std::int64_t>();
    case 3:
      return *rc::gen::arbitrary<double>();
    case 4:
      return *rc::gen::arbitrary<std::string>();
    case 5:
      return tensor();
    case 6:
      return *rc::gen::element(at::kFloat, at::kBool, at::kComplexDouble);
    case 7:
      return Opaque{*rc::gen::arbitrary<std::string>(), *rc::gen::arbitrary<std::string>(), some(tensor)};
    case 8:
      return kReference;
    case 9:
      return List{some(child)};
    case 10:
      return Tuple{some(child)};
    case 11:
      return Slice{{child(), child(), child()}};
    default:
      return Dict{some([&] { return std::pair(child(), child()); })};
  }
}

RC_GTEST_PROP(Encoding, AnyTreeArrivesAsItWas, ()) {
  const auto base = at::arange(24, at::kDouble).view({4, 6});
  const std::vector<at::Tensor> tensors = {
      base, base.t(), base[1], at::arange(5), at::Tensor(), at::arange(3, at::kFloat).set_requires_grad(true)};
  const auto tree = any_value(4, tensors);
  RC_ASSERT(text_of(sent(tree)) == text_of(tree));
}

Value nested(int levels) {
  Value tree = None{};
  for (int i = 1; i < levels; ++i) tree = List{{std::move(tree)}};
  return tree;
}

TEST(Encoding, ATreeMayBe500LevelsDeepAndNoDeeper) {
  EXPECT_NO_THROW(sent(nested(500)));
  EXPECT_THROW(encode(nested(501)), base::UsageError);
}

TEST(Encoding, BytesThatNestDeeperThanAnyTreeAreMalformed) {
  std::string meta(8, '\0');  // no tensors
  constexpr char kList = 10;
  for (int i = 0; i < 100000; ++i) meta += kList + std::string("\1\0\0\0\0\0\0\0", 8);
  EXPECT_THROW(decode(meta, {}), base::FormatError);
}

TEST(Encoding, ValuesThatNoTreeHoldsAreMalformed) {
  const auto meta = [](std::initializer_list<int> bytes) {
    std::string text(8, '\0');  // no tensors
    for (int byte : bytes) text += static_cast<char>(byte);
    return text;
  };
  constexpr int kNone = 0, kDtype = 7, kDevice = 8;
  EXPECT_NO_THROW(decode(meta({kNone}), {}));
  EXPECT_NO_THROW(decode(meta({kDtype, 6}), {}));
  EXPECT_THROW(decode(meta({kDtype, 127}), {}), base::FormatError);
  EXPECT_THROW(decode(meta({kDtype, 255}), {}), base::FormatError);
  EXPECT_EQ(decode(meta({kDevice, 0}), {}).get_if<at::Device>()->type(), at::kCPU);
  EXPECT_EQ(decode(meta({kDevice, 1}), {}).get_if<at::Device>()->type(), at::kCPU);  // the rank's is the host here
  EXPECT_THROW(decode(meta({kDevice, 2}), {}), base::FormatError);
  EXPECT_THROW(decode(meta({kDevice, 255}), {}), base::FormatError);
  EXPECT_THROW(decode(meta({kNone, kNone}), {}), base::FormatError);
  EXPECT_THROW(decode(meta({14}), {}), base::FormatError);
  EXPECT_THROW(decode(meta({}), {}), base::FormatError);
}

TEST(Value, AskedForAnotherKindItNamesBoth) {
  try {
    Value("text").as<List>();
    FAIL();
  } catch (const base::FormatError& error) {
    EXPECT_STREQ(error.what(), "expected a list, got a string");
  }
}

TEST(Value, AVisitMeetsEveryTensorInOrder) {
  Value tree = Dict{{{at::arange(1), Opaque{"", "", {at::arange(2)}}}, {"x", Tuple{{at::arange(3)}}}}};
  std::vector<std::int64_t> sizes;
  for_each_tensor(std::as_const(tree), [&](const at::Tensor& tensor) { sizes.push_back(tensor.numel()); });
  EXPECT_EQ(sizes, (std::vector<std::int64_t>{1, 2, 3}));
  for_each_tensor(tree, [](at::Tensor& tensor) { tensor = at::Tensor(); });
  EXPECT_FALSE(tree.as<Dict>().items[1].second.as<Tuple>().items[0].as<at::Tensor>().defined());
}

}  // namespace
}  // namespace lamina::value
