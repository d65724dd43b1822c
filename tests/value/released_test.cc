// SPDX-License-Identifier: Apache-2.0
// See [Note: released tensors].
#include "lamina/value/released.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include "lamina/value/encoding.h"
#include "tests/value/refusal.h"

namespace lamina::value {
namespace {

constexpr auto kWhy = "h.3.weight lives on rank 1; read it there";

at::Tensor released(at::ScalarType dtype = at::kFloat) {
  auto tensor = at::zeros({4, 3}, dtype).t();
  if (at::isFloatingType(dtype)) tensor = tensor.detach().set_requires_grad(true);
  release(tensor, kWhy);
  return tensor;
}

TEST(Released, MetadataIsReadAsBefore) {
  const auto tensor = released();
  EXPECT_TRUE(is_released(tensor));
  EXPECT_EQ(tensor.sizes(), (std::vector<std::int64_t>{3, 4}));
  EXPECT_EQ(tensor.strides(), (std::vector<std::int64_t>{1, 3}));
  EXPECT_EQ(tensor.numel(), 12);
  EXPECT_EQ(tensor.dim(), 2);
  EXPECT_EQ(tensor.scalar_type(), at::kFloat);
  EXPECT_EQ(tensor.device(), at::Device(at::kCPU));
  EXPECT_EQ(tensor.layout(), at::kStrided);
  EXPECT_TRUE(tensor.requires_grad());
  EXPECT_TRUE(tensor.is_leaf());
  EXPECT_FALSE(tensor.is_contiguous());
  EXPECT_FALSE(tensor.grad().defined());
  EXPECT_FALSE(tensor.is_meta() || tensor.is_sparse() || tensor.is_quantized());
  EXPECT_EQ(released(at::kLong).scalar_type(), at::kLong);
}

TEST(Released, RequiresGradMayBeChanged) {
  auto tensor = released();
  tensor.set_requires_grad(false);
  EXPECT_FALSE(tensor.requires_grad());
  tensor.requires_grad_(true);
  EXPECT_TRUE(tensor.requires_grad());
}

TEST(Released, StaysTheSameObjectAndFreesItsMemory) {
  auto tensor = at::zeros({3}).set_requires_grad(true);
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(tensor.storage().getWeakStorageImpl());
  const at::Tensor other_name = tensor;
  tensor.mutable_grad() = at::ones({3});
  release(tensor, kWhy);
  EXPECT_TRUE(is_released(other_name));
  EXPECT_TRUE(other_name.is_same(tensor));
  EXPECT_TRUE(storage.expired());
  EXPECT_FALSE(tensor.grad().defined());
}

TEST(Released, SaysWhereItIs) {
  EXPECT_EQ(where_released(released()), "h.3.weight lives on rank 1");
  EXPECT_EQ(where_released(at::zeros({3})), "");
  EXPECT_EQ(where_released(at::Tensor()), "");
}

TEST(Released, TwiceTakesTheLaterReason) {
  auto tensor = released();
  release(tensor, "another");
  EXPECT_NE(refusal([&] { tensor.add(1); }).find("another"), std::string::npos);
}

TEST(Released, MemoryIsKeptForOthersOrFreedThoughTheyAreAlive) {
  for (const Memory memory : {Memory::kKept, Memory::kFreed}) {
    auto tensor = at::ones({2, 3});
    const at::Tensor view = tensor.t();
    release(tensor, kWhy, {}, memory);
    const auto text = refusal([&] { view.sum(); });
    EXPECT_EQ(text.find(kWhy) != std::string::npos, memory == Memory::kFreed) << text;
    if (memory == Memory::kKept) {
      EXPECT_EQ(view.sum().item<double>(), 6);
    }
  }
}

TEST(Released, GivenAValueAgainItIsAnOrdinaryTensor) {
  auto tensor = at::zeros({3}).set_requires_grad(true);
  const at::Tensor other_name = tensor;
  release(tensor, kWhy);
  const auto value = at::ones({3});
  restore(tensor, value);
  EXPECT_FALSE(is_released(other_name));
  EXPECT_TRUE(other_name.is_same(tensor) && tensor.requires_grad() && tensor.is_leaf());
  EXPECT_EQ(tensor.const_data_ptr(), value.const_data_ptr());
  (other_name * 2).sum().backward();
  EXPECT_TRUE(at::equal(tensor.grad(), at::full({3}, 2.0)));
}

TEST(Released, AValueOfAnotherShapeOrTypeIsRefused) {
  auto tensor = released();
  EXPECT_NE(refusal([&] { restore(tensor, at::zeros({4, 3})); }).find("of shape [4, 3]"), std::string::npos);
  EXPECT_NE(refusal([&] { restore(tensor, at::zeros({3, 4}, at::kDouble)); }).find("Double"), std::string::npos);
  auto ordinary = at::zeros({3, 4});
  EXPECT_THROW(restore(ordinary, ordinary), base::InternalError);
}

TEST(Released, AnyOperationOnTheValueSaysWhy) {
  auto tensor = released();
  const auto plain = at::zeros({3, 4});
  auto output = at::zeros({3, 4});
  const std::vector<std::pair<const char*, std::function<void()>>> uses = {
      {"add", [&] { tensor.add(1); }},
      {"second argument", [&] { plain.add(tensor); }},
      {"in place", [&] { tensor.detach_(); }},
      {"zero_",
       [&] {
         at::NoGradGuard no_grad;
         tensor.zero_();
       }},
      {"copy_ to",
       [&] {
         at::NoGradGuard no_grad;
         tensor.copy_(plain);
       }},
      {"copy_ from", [&] { output.copy_(tensor); }},
      {"out",
       [&] {
         at::NoGradGuard no_grad;
         at::add_out(tensor, plain, plain);
       }},
      {"list", [&] { at::cat({plain, tensor}); }},
      {"stack", [&] { at::stack({plain, tensor}); }},
      {"optional", [&] { at::linear(plain, plain, std::optional<at::Tensor>(tensor)); }},
      {"index", [&] { plain.index({tensor}); }},
      {"view", [&] { tensor.view({12}); }},
      {"select", [&] { tensor[0]; }},
      {"detach", [&] { tensor.detach(); }},
      {"alias", [&] { tensor.alias(); }},
      {"clone", [&] { tensor.clone(); }},
      {"to", [&] { tensor.to(at::kDouble); }},
      {"contiguous", [&] { tensor.contiguous(); }},
      {"item", [&] { tensor.sum().item(); }},
      {"equal", [&] { at::equal(plain, tensor); }},
      {"no_grad",
       [&] {
         at::NoGradGuard no_grad;
         tensor.mul(2);
       }},
      {"inference",
       [&] {
         c10::InferenceMode mode;
         tensor.mul(2);
       }},
  };
  for (const auto& [what, use] : uses) {
    const auto text = refusal(use);
    EXPECT_NE(text.find(kWhy), std::string::npos) << what << ": " << text;
  }
}

TEST(Released, TheErrorNamesTheOperation) {
  auto tensor = released();
  EXPECT_NE(refusal([&] { tensor.mul(2); }).find("aten::mul"), std::string::npos);
}

TEST(Released, ItsMemoryIsAnErrorThatSaysWhy) {
  const auto tensor = released();
  for (const std::function<void()>& use :
       {std::function<void()>([&] { tensor.storage(); }), std::function<void()>([&] { tensor.data_ptr(); }),
        std::function<void()>([&] { tensor.const_data_ptr<float>(); })}) {
    try {
      use();
      ADD_FAILURE() << "no error";
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find(kWhy), std::string::npos) << error.what();
    }
  }
}

TEST(Released, CannotBeSentToAnotherRank) {
  EXPECT_NE(refusal([] { encode(released()); }).find("cannot be sent to another rank"), std::string::npos);
}

TEST(Released, OtherTensorsAreNoneOfItsBusiness) {
  EXPECT_FALSE(is_released(at::Tensor()));
  EXPECT_FALSE(is_released(at::zeros({1})));
}

}  // namespace
}  // namespace lamina::value
