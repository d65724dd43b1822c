// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/offload.h"

#include <utility>

#include "lamina/device/capabilities.h"
#include "lamina/device/copies.h"
#include "lamina/device/rank_device.h"

namespace lamina::runtime {
namespace {

constexpr std::int64_t kLeaving = 2;  // at a time

class Beside : public Copying {
 public:
  explicit Beside(std::unique_ptr<devices::CopyBeside> copy) : copy_(std::move(copy)) {}
  at::Tensor end() override { return copy_->end(); }

 private:
  const std::unique_ptr<devices::CopyBeside> copy_;
};

class DeviceMover : public Mover {
 public:
  bool moves(const at::Tensor& tensor) const override {
    const bool is_there = tensor.device() == devices::rank_device() && devices::has_streams(tensor.device());
    return is_there && tensor.layout() == at::kStrided;
  }
  std::unique_ptr<Copying> to_host(const at::Tensor& tensor) override {
    return std::make_unique<Beside>(devices::CopyBeside::out(tensor));
  }
  std::unique_ptr<Copying> to_device(const at::Tensor& host) override {
    return std::make_unique<Beside>(devices::CopyBeside::in(host));
  }
};

}  // namespace

std::shared_ptr<Mover> make_device_mover() { return std::make_shared<DeviceMover>(); }

std::shared_ptr<Offload::Kept> Offload::keep(const at::Tensor& tensor) {
  if (!mover_->moves(tensor)) return nullptr;
  auto kept = std::make_shared<Kept>();
  kept->offload_ = shared_from_this();
  const std::lock_guard guard(mutex_);
  kept->number_ = next_++;
  kept_[kept->number_].leaving = mover_->to_host(tensor);
  if (const auto earlier = kept_.find(kept->number_ - kLeaving); earlier != kept_.end()) earlier->second.let_go();
  return kept;
}

void Offload::Activation::let_go() {
  if (leaving) host = std::exchange(leaving, nullptr)->end();
}

void Offload::Activation::begin_to_come(Mover& mover) {
  if (coming) return;
  let_go();
  coming = mover.to_device(host);
}

at::Tensor Offload::take(std::int64_t number) {
  const std::lock_guard guard(mutex_);
  const auto found = kept_.find(number);
  found->second.begin_to_come(*mover_);
  auto before = found;
  for (int ahead = 0; ahead < horizon_ && before != kept_.begin(); ++ahead) (--before)->second.begin_to_come(*mover_);
  return std::exchange(found->second.coming, nullptr)->end();
}

void Offload::forget(std::int64_t number) {
  const std::lock_guard guard(mutex_);
  kept_.erase(number);
}

Offload::Kept::~Kept() {
  if (offload_) offload_->forget(number_);
}

at::Tensor Offload::Kept::take() { return offload_->take(number_); }

}  // namespace lamina::runtime
