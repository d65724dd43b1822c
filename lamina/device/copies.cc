// SPDX-License-Identifier: Apache-2.0
#include "lamina/device/copies.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>
#include <utility>

#include "lamina/device/capabilities.h"
#include "lamina/device/rank_device.h"

namespace lamina::devices {
namespace {

// The streams of copies to and from the rank's device, made when the first is wanted. They are never destroyed: the
// device's own may be gone before what is static here.
struct Streams {
  explicit Streams(at::Device of) : device(of), out(pool(of)), in(pool(of)), computing(*default_stream()) {}
  static c10::Stream pool(at::Device device) {
    return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  }

  const at::Device device;
  const c10::Stream out, in;
  std::mutex mutex;                   // of the rest
  std::optional<c10::Event> arrived;  // the last copy on `in`
  c10::Stream computing;              // which reads what arrives
};

Streams& streams() {
  static std::mutex mutex;
  static Streams* known = nullptr;
  const std::lock_guard lock(mutex);
  if (known == nullptr || known->device != rank_device()) known = new Streams(rank_device());
  return *known;
}

c10::Stream current(at::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

void keep_for(const at::Tensor& tensor, const c10::Stream& stream) {
  c10::impl::VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

}  // namespace

CopyOut::CopyOut(const at::Tensor& bytes, bool is_alone) {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  auto& copies = streams();
  const auto original = is_alone ? bytes : bytes.clone();
  c10::Event made(copies.device.type());
  made.record(current(copies.device));
  host_ = at::empty(original.sizes(), original.options().device(kHost).pinned_memory(true));
  const c10::StreamGuard on(copies.out);
  made.block(copies.out);
  host_.copy_(original, /*non_blocking=*/true);
  copied_.emplace();
  keep_for(original, copies.out);
}

LentBytes::LentBytes(at::Tensor bytes) : bytes_(std::move(bytes)) {}

LentBytes LentBytes::of(const at::Tensor& bytes, bool is_alone) {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  return LentBytes(is_alone ? bytes : bytes.clone());
}

LentBytes LentBytes::room(std::int64_t size) {
  const c10::InferenceMode normal(false);
  auto& copies = streams();
  const std::lock_guard lock(copies.mutex);
  const c10::StreamGuard on(copies.in);
  LentBytes room(at::empty({size}, at::TensorOptions(at::kByte).device(copies.device)));
  keep_for(room.bytes(), copies.computing);
  return room;
}

CopyBeside::CopyBeside(at::Tensor from, at::Tensor to, const c10::Stream& on)
    : from_(std::move(from)), to_(std::move(to)), stream_(current(on.device())), copied_(on.device_type()) {
  c10::Event begins(on.device_type());
  begins.record(stream_);
  begins.block(on);
  const c10::StreamGuard guard(on);
  to_.copy_(from_, /*non_blocking=*/true);
  copied_.record(on);
}

std::unique_ptr<CopyBeside> CopyBeside::out(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  auto host = at::empty_like(tensor, tensor.options().device(kHost).pinned_memory(true));
  return std::unique_ptr<CopyBeside>(new CopyBeside(tensor.detach(), std::move(host), streams().out));
}

std::unique_ptr<CopyBeside> CopyBeside::in(const at::Tensor& host) {
  const at::NoGradGuard no_grad;
  auto there = at::empty_like(host, host.options().device(rank_device()).pinned_memory(false));
  return std::unique_ptr<CopyBeside>(new CopyBeside(host, std::move(there), streams().in));
}

CopyBeside::~CopyBeside() {
  if (!from_.defined()) return;  // it has ended
  try {
    copied_.block(stream_);
  } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch): of a device that has failed nothing is used again
  }
}

at::Tensor CopyBeside::end() {
  copied_.block(stream_);
  if (const auto reader = current(stream_.device()); reader != stream_) copied_.block(reader);
  from_.reset();
  return to_;
}

at::Tensor pinned_bytes(std::int64_t size) {
  return at::empty({size}, at::TensorOptions(at::kByte).device(kHost).pinned_memory(true));
}

at::Tensor copy_in(const at::Tensor& host) {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  auto& copies = streams();
  const std::lock_guard lock(copies.mutex);
  const c10::StreamGuard on(copies.in);
  auto there = at::empty_like(host, host.options().device(copies.device).pinned_memory(false));
  there.copy_(host, /*non_blocking=*/true);
  if (!copies.arrived) copies.arrived.emplace(copies.device.type());
  copies.arrived->record(copies.in);
  keep_for(there, copies.computing);
  return there;
}

void join_arrivals() {
  if (!has_streams(rank_device())) return;
  auto& copies = streams();
  const std::lock_guard lock(copies.mutex);
  if (copies.arrived) copies.arrived->block(current(copies.device));
}

void join_arrival(const at::Tensor& tensor) {
  if (!tensor.defined() || !has_streams(tensor.device()) || !tensor.has_storage()) return;
  join_arrivals();
  const auto reader = current(tensor.device());
  auto& copies = streams();
  const std::lock_guard lock(copies.mutex);
  if (reader != copies.computing) keep_for(tensor, reader);
}

void compute_on_this_stream() {
  if (!has_streams(rank_device())) return;
  auto& copies = streams();
  const std::lock_guard lock(copies.mutex);
  copies.computing = current(copies.device);
}

}  // namespace lamina::devices
