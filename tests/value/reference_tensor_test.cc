// SPDX-License-Identifier: Apache-2.0
// See [Note: reference tensors]: what is read without waiting, and what makes a reference become its value.
#include "lamina/value/reference_tensor.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <thread>

#include "tests/value/sent.h"
#include "tests/value/sources.h"

namespace lamina::value {
namespace {

at::Tensor some_value() { return at::arange(6, at::kFloat).view({2, 3}); }

// How many of its arguments are still pending when an operation runs.
std::int64_t count_pending(const at::Tensor& tensor, const c10::Dict<std::string, at::Tensor>& dict,
                           const std::tuple<at::Tensor, at::Tensor>& pair, const std::optional<at::Tensor>& optional) {
  return is_pending(tensor) + is_pending(dict.at("key")) + is_pending(std::get<0>(pair)) +
         is_pending(std::get<1>(pair)) + is_pending(*optional);
}

TORCH_LIBRARY(lamina_reference_test, library) {
  library.def("count_pending(Tensor t, Dict(str, Tensor) d, (Tensor, Tensor) p, Tensor? o) -> int", &count_pending);
}

TEST(Reference, MetadataIsReadWithoutWaiting) {
  const auto source = std::make_shared<Made>([]() -> at::Tensor { throw std::runtime_error("was read"); });
  auto tensor = make_reference({{2, 3}, {1, 2}, at::kDouble, at::kCPU}, source, Strides::kAsSpecified);
  EXPECT_EQ(spec_of(tensor), (TensorSpec{{2, 3}, {1, 2}, at::kDouble, at::kCPU}));
  EXPECT_EQ(tensor.numel() + tensor.dim() + tensor.size(1), 6 + 2 + 3);
  EXPECT_FALSE(tensor.is_contiguous() || tensor.requires_grad() || tensor.is_meta() || tensor.is_sparse());
  EXPECT_FALSE(tensor.grad_fn() || tensor.is_inference() || tensor.is_conj());
  EXPECT_EQ(tensor._version(), 0);
  tensor.set_requires_grad(true);
  EXPECT_TRUE(tensor.is_leaf() && tensor.requires_grad() && !tensor.grad().defined());
  EXPECT_TRUE(is_pending(tensor) && source_of(tensor) == source);
  EXPECT_EQ(source->takes(), 0);
}

TEST(Reference, AnOperationMakesItItsValueInPlaceOnce) {
  const auto value = some_value();
  const auto source = std::make_shared<Made>(value);
  const auto tensor = make_reference(spec_of(value), source, Strides::kAsSpecified);
  const auto other_name = tensor;
  const auto* impl = tensor.unsafeGetTensorImpl();
  EXPECT_TRUE(at::equal(tensor * 2, value * 2));
  EXPECT_FALSE(is_pending(tensor) || is_pending(other_name) || source_of(tensor));
  EXPECT_TRUE(at::equal(other_name.sum(), value.sum()));
  EXPECT_EQ(tensor.unsafeGetTensorImpl(), impl);
  EXPECT_EQ(tensor.key_set(), value.key_set());
  EXPECT_EQ(tensor.const_data_ptr(), value.const_data_ptr());
  EXPECT_EQ(source->takes(), 1);
}

TEST(Reference, EveryWayToTheValueMakesItBecomeIt) {
  const auto value = some_value();
  const std::vector<std::pair<const char*, std::function<void(at::Tensor&)>>> uses = {
      {"operation", [](auto& it) { it.mul(2); }},
      {"second argument", [](auto& it) { at::ones({2, 3}).mul(it); }},
      {"list", [](auto& it) { at::cat({at::ones({2, 3}), it}); }},
      {"optional", [](auto& it) { at::layer_norm(at::ones({2, 3}), {2, 3}, it); }},
      {"list of optionals", [](auto& it) { at::ones({9}).index({it.to(at::kLong)}); }},
      {"in place", [](auto& it) { it.add_(1); }},
      {"view", [](auto& it) { it.view({6}); }},
      {"out", [](auto& it) { at::add_out(it, at::ones({2, 3}), at::ones({2, 3})); }},
      {"storage", [](auto& it) { it.storage(); }},
      {"has_storage", [](auto& it) { EXPECT_TRUE(it.has_storage()); }},
      {"data_ptr", [](auto& it) { EXPECT_NE(it.data_ptr(), nullptr); }},
      {"const_data_ptr", [](auto& it) { EXPECT_NE(it.template const_data_ptr<float>(), nullptr); }},
      {"variable_data", [](auto& it) { EXPECT_EQ(it.variable_data().numel(), 6); }},
      {"tensor_data", [](auto& it) { EXPECT_EQ(it.tensor_data().numel(), 6); }},
      {"set_data", [](auto& it) { it.set_data(at::ones({2, 3})); }},
      {"set_data from", [](auto& it) { at::ones({2, 3}).set_data(it); }},
      {"add outside the engine", [](auto& it) { at::add(it, it); }},
      {"encode", [](auto& it) { EXPECT_TRUE(at::equal(sent(Value(it)).template as<at::Tensor>(), some_value())); }},
      {"materialise", [](auto& it) { materialise(it); }},
  };
  for (const auto& [what, use] : uses) {
    auto tensor = reference(value.clone());
    ASSERT_TRUE(is_pending(tensor));
    at::NoGradGuard no_grad;
    use(tensor);
    EXPECT_FALSE(is_pending(tensor)) << what;
    EXPECT_EQ(tensor.mul(1).numel(), 6) << what;
  }
}

TEST(Reference, AnOperationSeesNoPendingArgumentHoweverDeep) {
  const auto pending = [] { return reference(some_value()); };
  const auto count = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("lamina_reference_test::count_pending", "")
                         .typed<decltype(count_pending)>();
  c10::Dict<std::string, at::Tensor> dict;
  dict.insert("key", pending());
  EXPECT_EQ(count.call(pending(), dict, {pending(), pending()}, pending()), 0);
}

TEST(Reference, TwoThreadsMayReadAtOnce) {
  const auto source = std::make_shared<Awaited>();
  const auto tensor = make_reference(spec_of(some_value()), source, Strides::kAsSpecified);
  std::vector<double> sums(2);
  std::vector<std::thread> readers;
  for (auto& sum : sums) readers.emplace_back([&] { sum = tensor.sum().item<double>(); });
  source->await_readers(2);
  EXPECT_TRUE(is_pending(tensor));
  source->deliver(some_value());
  for (auto& reader : readers) reader.join();
  EXPECT_EQ(sums, (std::vector<double>{15, 15}));
}

TEST(Reference, ThoseOfOneSourceAreAliases) {
  const auto source = std::make_shared<Made>(some_value());
  const auto a = make_reference(spec_of(some_value()), source, Strides::kAsSpecified);
  const auto b = make_reference(spec_of(some_value()), source, Strides::kAsSpecified);
  a.add_(1);
  EXPECT_EQ(b._version(), 1);
  EXPECT_TRUE(is_pending(b));
  EXPECT_TRUE(at::equal(b, some_value() + 1));
}

TEST(Reference, DetachingLeavesItPendingAndSharesTheValue) {
  auto tensor = reference(some_value());
  tensor.set_requires_grad(true);
  const auto detached = tensor.detach();
  EXPECT_TRUE(is_pending(tensor) && is_pending(detached));
  EXPECT_EQ(source_of(tensor), source_of(detached));
  EXPECT_FALSE(detached.requires_grad() || detached.is_same(tensor));
  detached.mul_(2);
  EXPECT_TRUE(is_pending(tensor));
  EXPECT_EQ(tensor._version(), 1);
  EXPECT_TRUE(at::equal(tensor, some_value() * 2));
}

TEST(Reference, WritesCountFromZeroWhateverWasDoneToTheValueBefore) {
  const auto tensor = reference(some_value().add_(1).mul_(2));
  const auto before = tensor._version();
  materialise(tensor);
  EXPECT_EQ(tensor._version(), before);
}

TEST(Reference, ASourceMayGiveAReference) { EXPECT_TRUE(at::equal(reference(reference(some_value())), some_value())); }

TEST(Reference, LetsGoOfItsSourceWhenItHasItsValue) {
  auto source = std::make_shared<Made>(some_value());
  const std::weak_ptr<Source> watched = source;
  const auto tensor = make_reference(spec_of(some_value()), std::move(source), Strides::kAsSpecified);
  materialise(tensor);
  EXPECT_TRUE(watched.expired());
}

TEST(Reference, LetsGoOfItsSourceWhenOnlyWeakReferencesAreLeft) {
  auto source = std::make_shared<Made>(some_value());
  const std::weak_ptr<Source> watched = source;
  auto tensor = make_reference(spec_of(some_value()), std::move(source), Strides::kAsSpecified);
  const c10::weak_intrusive_ptr<c10::TensorImpl> weak(tensor.getIntrusivePtr());
  tensor.reset();
  EXPECT_TRUE(watched.expired());
}

TEST(Reference, OtherTensorsAreNoneOfItsBusiness) {
  for (const auto& tensor : {at::Tensor(), at::ones({1})}) {
    EXPECT_FALSE(is_pending(tensor) || source_of(tensor));
    materialise(tensor);
  }
}

}  // namespace
}  // namespace lamina::value
