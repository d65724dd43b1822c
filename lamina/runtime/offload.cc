// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/offload.h"

#include <ATen/ops/empty_like.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace lamina::runtime {
namespace {

class DeviceMover : public Mover {
 public:
  bool moves(const at::Tensor& tensor) const override { return !tensor.is_cpu() && !tensor.is_meta(); }

  std::unique_ptr<Copying> to_host(const at::Tensor& tensor) override {
    const at::NoGradGuard no_grad;
    auto host = at::empty_like(tensor, tensor.options().device(at::kCPU).pinned_memory(true));
    return copy(tensor, std::move(host), tensor.device());
  }

  std::unique_ptr<Copying> to_device(const at::Tensor& host, at::Device device) override {
    const at::NoGradGuard no_grad;
    return copy(host, at::empty_like(host, host.options().device(device).pinned_memory(false)), device);
  }

 private:
  // In a stream of its own: after what the device has been given so far, and before what comes after wait().
  class InStream : public Copying {
   public:
    InStream(at::Tensor from, at::Tensor to, at::Device device)
        : from_(std::move(from)), to_(std::move(to)), device_(device), done_(device.type()) {
      const c10::impl::VirtualGuardImpl devices(device.type());
      const auto stream = devices.getStreamFromGlobalPool(device);
      c10::Event given(device.type());
      given.record(devices.getStream(device));
      given.block(stream);
      const c10::StreamGuard beside(stream);
      to_.copy_(from_, /*non_blocking=*/true);
      done_.record(stream);
    }
    at::Tensor wait() override {
      if (to_.is_cpu()) {
        done_.synchronize();  // whoever reads the host's memory does so at once
      } else {
        done_.block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
      }
      from_.reset();
      return to_;
    }

   private:
    at::Tensor from_, to_;
    const at::Device device_;
    c10::Event done_;
  };

  static std::unique_ptr<Copying> copy(const at::Tensor& from, at::Tensor to, at::Device device) {
    return std::make_unique<InStream>(from, std::move(to), device);
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
  kept_[kept->number_] = {tensor.device(), mover_->to_host(tensor.detach()), {}, {}};
  return kept;
}

void Offload::Activation::begin_to_come(Mover& mover) {
  if (coming) return;
  if (leaving) host = std::exchange(leaving, nullptr)->wait();
  coming = mover.to_device(host, device);
}

at::Tensor Offload::take(std::int64_t number) {
  const std::lock_guard guard(mutex_);
  const auto found = kept_.find(number);
  found->second.begin_to_come(*mover_);
  auto before = found;
  for (int ahead = 0; ahead < horizon_ && before != kept_.begin(); ++ahead) (--before)->second.begin_to_come(*mover_);
  return std::exchange(found->second.coming, nullptr)->wait();
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
