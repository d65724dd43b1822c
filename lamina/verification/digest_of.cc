// SPDX-License-Identifier: Apache-2.0
#include "lamina/verification/digest_of.h"

#include <ATen/Dispatch.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "lamina/device/capabilities.h"
#include "lamina/value/dtype.h"

namespace lamina::verification {

using digests::Digest;
using digests::kBlock;

namespace {

// A hash of an element's bits and its place.
template <class Element>
std::uint64_t hash(const Element& element, std::int64_t place) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &element, std::min(sizeof element, sizeof bits));
  bits ^= static_cast<std::uint64_t>(place) * 0x9e3779b97f4a7c15;
  bits = (bits ^ (bits >> 32)) * 0xd6e8feb86659fd93;
  return bits ^ (bits >> 32);
}

// One pass over the numbers as doubles, block by block.
class Summing {
 public:
  explicit Summing(Digest& digest) : digest_(digest) {}

  template <class Element>
  void add(const Element* elements, bool bits) {
    for (std::int64_t at = 0; at < digest_.elements;) {
      const std::int64_t place = digest_.begin + at;
      const std::int64_t count = std::min(kBlock - place % kBlock, digest_.elements - at);
      for (std::int64_t i = 0; i < count; ++i) block_[i] = static_cast<double>(elements[at + i]);
      if (bits) {
        for (std::int64_t i = 0; i < count; ++i) digest_.bits += hash(elements[at + i], place + i);
      }
      digests::add(digest_, place, {block_.data(), static_cast<std::size_t>(count)});
      at += count;
    }
  }

  template <class Element>
  void count_small(const Element* elements) {
    const double limit = digest_.largest * digests::kSmall;
    for (std::int64_t i = 0; i < digest_.elements; ++i) {
      const double size = std::abs(static_cast<double>(elements[i]));
      digest_.small += static_cast<std::int64_t>(size > 0 && size < limit);
    }
  }

 private:
  Digest& digest_;
  std::array<double, kBlock> block_;
};

std::string name_of(at::ScalarType type) {
  const auto known = value::dtype_of(type);
  return known ? std::string(layout::traits(*known).name) : c10::toString(type);
}

// While it lives operations are torch's own: no mode of the script's sees them, and none changes what they return.
struct Plainly {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_modes{c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher,
       c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
       c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

Digest make_digest(const at::Tensor& tensor, bool bits, const PartOf& part, bool counts_small) {
  const Plainly plainly;
  Digest digest{.dtype = name_of(tensor.scalar_type()), .shape = part.shape, .begin = part.begin};
  at::Tensor values = tensor.detach();
  if (values.layout() != at::kStrided) values = values.to_dense();
  if (values.is_quantized()) values = values.dequantize();
  if (values.is_complex()) {
    values = at::view_as_real(values.resolve_conj());
    digest.shape.push_back(2);
    digest.begin *= 2;
  }
  if (at::isFloat8Type(values.scalar_type())) values = values.to(at::kFloat);
  if (at::isBarebonesUnsignedType(values.scalar_type())) {  // which torch has few functions of: as bytes
    const auto bytes = static_cast<std::int64_t>(values.element_size());
    values = values.contiguous().view(at::kByte);
    digest.shape.push_back(bytes);
    digest.begin *= bytes;
  }
  // Numbers of a device come to the host as they are: sums there would be in another order.
  values = values.to(devices::kHost).resolve_neg().contiguous();
  digest.elements = values.numel();
  Summing summing(digest);
  AT_DISPATCH_ALL_TYPES_AND3(at::kHalf, at::kBFloat16, at::kBool, values.scalar_type(), "digest_of", [&] {
    summing.add(values.const_data_ptr<scalar_t>(), bits);
    if (counts_small) summing.count_small(values.const_data_ptr<scalar_t>());
  });
  return digest;
}

}  // namespace

bool digest_can_be_made(at::ScalarType type) {
  return c10::isIntegralType(type, /*includeBool=*/true) || c10::isComplexType(type) || c10::isQIntType(type) ||
         (c10::isFloatingType(type) && type != at::ScalarType::Float4_e2m1fn_x2);
}

Digest digest_of(const at::Tensor& tensor, bool bits) {
  return make_digest(tensor, bits, {tensor.sizes().vec(), 0}, /*counts_small=*/false);
}

Digest digest_of(const at::Tensor& tensor, bool bits, const PartOf& part) {
  return make_digest(tensor, bits, part, /*counts_small=*/true);
}

}  // namespace lamina::verification
