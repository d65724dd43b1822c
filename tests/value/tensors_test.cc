// SPDX-License-Identifier: Apache-2.0
// Tensors: what they look like when they arrive, and what of their memory they share.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include "lamina/base/error.h"
#include "tests/value/sent.h"

namespace lamina::value {
namespace {

at::Tensor arrived(const at::Tensor& tensor) { return sent(Value(tensor)).as<at::Tensor>(); }

std::int64_t bytes_sent(const Value& tree) {
  std::int64_t bytes = 0;
  for (const auto& buffer : encode(tree).buffers) bytes += buffer.numel();
  return bytes;
}

void expect_same(const at::Tensor& got, const at::Tensor& wanted) {
  EXPECT_EQ(got.scalar_type(), wanted.scalar_type());
  EXPECT_EQ(got.sizes(), wanted.sizes());
  EXPECT_EQ(got.device(), wanted.device());
  EXPECT_TRUE(at::equal(got, wanted)) << got << wanted;
}

TEST(Tensors, ArriveWithTheirValuesForEveryDtype) {
  for (auto dtype : {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat,
                     at::kDouble, at::kBool, at::kComplexFloat, at::kComplexDouble}) {
    expect_same(arrived(at::arange(7).to(dtype)), at::arange(7).to(dtype));
  }
  for (auto dtype : {at::kUInt16, at::kUInt32, at::kUInt64, at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kComplexHalf}) {
    const auto tensor = at::arange(7, at::kFloat).to(dtype);
    const auto got = arrived(tensor);
    EXPECT_EQ(got.scalar_type(), dtype);
    EXPECT_EQ(std::memcmp(got.const_data_ptr(), tensor.const_data_ptr(), tensor.nbytes()), 0) << dtype;
  }
}

TEST(Tensors, KeepTheirStridesWhereTheyCoverTheirStorage) {
  const auto base = at::arange(24, at::kFloat).view({2, 3, 4, 1});
  for (const auto& tensor : {base, base.permute({2, 0, 3, 1}), base.contiguous(at::MemoryFormat::ChannelsLast),
                             at::arange(3).expand({5, 3}), at::arange(1)[0], at::arange(6).unfold(0, 3, 1)}) {
    expect_same(arrived(tensor), tensor);
    EXPECT_EQ(arrived(tensor).strides(), tensor.strides());
  }
}

TEST(Tensors, MayBeEmptyOrUndefined) {
  EXPECT_FALSE(arrived(at::Tensor()).defined());
  for (const auto& tensor : {at::empty({0}), at::empty({3, 0, 2}), at::arange(9).slice(0, 9, 9)}) {
    expect_same(arrived(tensor), tensor);
    EXPECT_EQ(bytes_sent(tensor), 0);
  }
}

TEST(Tensors, AnEmptyViewBeyondItsStorageLeavesTheStorageAlone) {
  const auto base = at::arange(10, at::kFloat);
  const void* data = base.const_data_ptr();
  expect_same(arrived(base.as_strided({0}, {1}, 100000)), at::empty({0}));
  EXPECT_EQ(base.storage().nbytes(), 40);
  EXPECT_EQ(base.const_data_ptr(), data);
}

TEST(Tensors, ConjugateAndNegativeViewsArriveResolved) {
  const auto tensor = at::complex(at::arange(3, at::kFloat), at::ones({3}));
  for (const auto& view : {tensor.conj(), at::imag(tensor.conj())}) {
    const auto got = arrived(view);
    EXPECT_FALSE(got.is_conj() || got.is_neg());
    expect_same(got, view.resolve_conj().resolve_neg());
  }
}

TEST(Tensors, ATensorOfZerosWithoutMemoryArrivesAsZeros) {
  expect_same(arrived(at::_efficientzerotensor({1000}, at::kFloat)), at::zeros({1000}));
}

TEST(Tensors, ArriveAsLeavesWithTheirRequiresGrad) {
  const auto weight = at::ones({2}).set_requires_grad(true);
  const auto got = sent(List{{weight, weight * 2, weight.detach()}});
  EXPECT_TRUE(tensor_at(got, 0).requires_grad());
  EXPECT_TRUE(tensor_at(got, 1).requires_grad());
  EXPECT_FALSE(tensor_at(got, 2).requires_grad());
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(tensor_at(got, i).is_leaf());
}

TEST(Tensors, ArriveAsOrdinaryTensorsWhateverTheModesOfBothSides) {
  c10::InferenceMode inference(true);
  const auto got = arrived(at::ones({2}));
  EXPECT_FALSE(got.is_inference());
  EXPECT_FALSE(got.requires_grad());
}

TEST(Tensors, SendingLeavesTheSendersTensorAsItWas) {
  const auto weight = at::ones({2}).set_requires_grad(true);
  const auto y = weight * 2;
  const auto version = y._version();
  encode(List{{y, y.view({2, 1})}});
  EXPECT_TRUE(y.grad_fn() != nullptr && y.requires_grad());
  EXPECT_EQ(y._version(), version);
}

TEST(Aliases, OneObjectInTwoPlacesStaysOneObject) {
  const auto tensor = at::arange(3);
  const auto got = sent(List{{tensor, tensor, Opaque{"", "", {tensor}}}});
  EXPECT_TRUE(tensor_at(got, 0).is_same(tensor_at(got, 1)));
  EXPECT_TRUE(tensor_at(got, 0).is_same(got.as<List>().items[2].as<Opaque>().tensors[0]));
}

TEST(Aliases, ViewsOfOneStorageShareItAgain) {
  const auto base = at::zeros({4, 4});
  const auto got = sent(List{{base, base[1], base.t(), base.view(at::kInt)}});
  tensor_at(got, 1).fill_(1);
  EXPECT_EQ(tensor_at(got, 0).sum().item<float>(), 4);
  EXPECT_TRUE(at::equal(tensor_at(got, 2), tensor_at(got, 0).t()));
  EXPECT_EQ(tensor_at(got, 3)[1][0].item<int>(), 0x3f800000);
  EXPECT_EQ(bytes_sent(List{{base, base[1], base.t()}}), 64);
}

TEST(Aliases, DisjointViewsShareNothingThatIsSeen) {
  const auto base = at::arange(1000, at::kDouble);
  const auto got = sent(List{{base.slice(0, 3, 5), base.slice(0, 990, 1000)}});
  tensor_at(got, 0).fill_(-1);
  expect_same(tensor_at(got, 1), base.slice(0, 990, 1000));
}

TEST(Aliases, ViewsOfDifferentDtypesAtOddOffsetsStayAligned) {
  const auto bytes = at::arange(200, at::kByte);
  const auto doubles = bytes.slice(0, 72, 136).view(at::kDouble);
  const auto got = sent(List{{bytes.slice(0, 71, 80), doubles}});
  expect_same(tensor_at(got, 0), bytes.slice(0, 71, 80));
  expect_same(tensor_at(got, 1), doubles);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor_at(got, 1).const_data_ptr()) % 8, 0);
}

TEST(Aliases, TheReceiversMemoryIsItsOwn) {
  const auto tensor = at::zeros({3});
  const auto got = arrived(tensor);
  tensor.fill_(1);
  EXPECT_EQ(got.sum().item<float>(), 0);
}

TEST(Compaction, ASmallViewOfALargeStorageTravelsAlone) {
  const auto large = at::zeros({1000, 1000});
  EXPECT_LE(bytes_sent(large[7]), 4000 + 64);
  EXPECT_EQ(bytes_sent(large.select(1, 7)), 4000);  // one column: copied
  expect_same(arrived(large.select(1, 7)), large.select(1, 7));
  EXPECT_EQ(bytes_sent(at::zeros({1}).expand({1000000})), 4);
}

TEST(Refused, TensorsThatAreNotDenseAndStridedAreTheSendersError) {
  const auto dense = at::ones({2, 2});
  const auto subclass = at::ones({2});
  subclass.unsafeGetTensorImpl()->set_python_dispatch(true);
  for (const auto& tensor :
       {subclass, dense.to_sparse(), dense.to_sparse_csr(), at::empty({2}, at::kMeta),
        at::quantize_per_tensor(dense, 1.0, 0, at::kQInt8), at::empty({2}, at::TensorOptions(at::ScalarType::Bits8))}) {
    try {
      encode(List{{tensor}});
      ADD_FAILURE() << tensor.toString();
    } catch (const base::UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("cannot be sent to another rank"), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace lamina::value
