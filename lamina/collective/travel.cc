// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/travel.h"
#include "lamina/device/capabilities.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <utility>

namespace lamina::collective {
namespace {

// The last step of a sum: what has travelled becomes the tensor's, once each member's part of it has come.
class Travelled : public Work {
 public:
  Travelled(Started begun, at::Tensor sum, at::Tensor tensor)
      : begun_(std::move(begun)), sum_(std::move(sum)), tensor_(std::move(tensor)) {}
  // Each member has its part of the sum in `part` when that has ended; all of them travel again, in the sum's type.
  Travelled(Started begun, at::Tensor sum, at::Tensor tensor, at::Tensor part, Group& group, CallOptions call_options)
      : Travelled(std::move(begun), std::move(sum), std::move(tensor)) {
    part_ = std::move(part);
    group_ = &group;
    terms_ = std::move(call_options);
  }
  bool done() override { return group_ == nullptr && begun_->done(); }
  void wait() override {
    const at::NoGradGuard no_grad;
    begun_->wait();
    if (group_ != nullptr) group_->all_gather(sum_, part_.to(sum_.scalar_type()), std::move(terms_))->wait();
    tensor_.copy_(sum_.narrow(0, 0, tensor_.numel()).view(tensor_.sizes()));
  }

 private:
  const Started begun_;
  const at::Tensor sum_;
  at::Tensor tensor_, part_;
  Group* group_ = nullptr;
  CallOptions terms_;
};

}  // namespace

std::optional<at::ScalarType> travelling(at::ScalarType type, std::optional<at::ScalarType> asked) {
  const bool as_it_is = asked == type && c10::elementSize(type) >= 4;  // whose sums are as wide anyway
  return c10::isFloatingType(type) && !as_it_is ? asked : std::nullopt;
}

at::Tensor to_travel(const at::Tensor& tensor, at::ScalarType type, int divisor) {
  const auto wide = c10::promoteTypes(tensor.scalar_type(), at::kFloat);
  return divisor == 1 ? tensor.to(type, /*non_blocking=*/false, /*copy=*/true)
                      : tensor.to(wide, /*non_blocking=*/false, /*copy=*/true).div_(divisor).to(type);
}

Started all_reduce_as(at::ScalarType type, at::Tensor tensor, int divisor, Group& group, CallOptions call_options) {
  const at::NoGradGuard no_grad;
  auto sent = to_travel(tensor, type, divisor).view({-1});
  const bool sums_wide = c10::elementSize(type) >= 4 || (devices::is_host(sent) && group.shares_memory());
  if (sums_wide || sent.numel() == 0) {
    auto begun = group.all_reduce(sent, Reduction::kSum, std::move(call_options));
    return std::make_unique<Travelled>(std::move(begun), std::move(sent), std::move(tensor));
  }
  const auto each = (sent.numel() + group.size() - 1) / group.size();
  sent = at::constant_pad_nd(sent, {0, each * group.size() - sent.numel()});
  auto part = at::empty({each}, sent.options().dtype(at::kFloat));
  auto begun = group.reduce_scatter(part, sent, Reduction::kSum, call_options);
  return std::make_unique<Travelled>(std::move(begun), std::move(sent), std::move(tensor), std::move(part), group,
                                     std::move(call_options));
}

}  // namespace lamina::collective
