// SPDX-License-Identifier: Apache-2.0
#include "tests/emulated/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/GeneratorImpl.h>

#include <array>
#include <cstring>
#include <mutex>
#include <vector>

#include "tests/emulated/settings.h"
#include "tests/emulated/stream.h"

namespace emulated {
namespace {

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(int device)
      : GeneratorImpl({kType, static_cast<c10::DeviceIndex>(device)},
                      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(std::uint64_t seed) override { state_ = {seed, 0}; }
  std::uint64_t current_seed() const override { return state_[0]; }

  std::uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return current_seed();
  }

  void set_offset(std::uint64_t offset) override { state_[1] = offset; }
  std::uint64_t get_offset() const override { return state_[1]; }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    touch(device_.index());
    auto bytes = at::detail::empty_cpu({sizeof(state_)}, at::kByte);  // no operation that modes see, as in CUDA
    std::memcpy(bytes.mutable_data_ptr(), state_.data(), sizeof(state_));
    return bytes.getIntrusivePtr();
  }

  void set_state(const c10::TensorImpl& state) override {
    touch(device_.index());
    TORCH_CHECK(state.device().is_cpu() && state.dtype() == caffe2::TypeMeta::Make<std::uint8_t>() &&
                    state.numel() == sizeof(state_) && state.is_contiguous(),
                "emulated: the state of a generator is ", sizeof(state_), " bytes on the CPU");
    std::memcpy(state_.data(), state.data(), sizeof(state_));
  }

  // Names the sequence that the next kernel draws from.
  std::uint64_t next() {
    std::uint64_t mixed = state_[0] ^ (state_[1] + 0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111eb;
    state_[1] += 4;
    return mixed ^ mixed >> 31;
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->state_ = state_;
    return copy;
  }

  std::array<std::uint64_t, 2> state_{c10::default_rng_seed_val, 0};  // the seed and the offset
};

}  // namespace

at::Generator make_generator(int device) { return at::make_generator<Generator>(device_or_current(device)); }

const at::Generator& default_generator(int device) {
  static const auto& all = *new std::vector<at::Generator>([] {
    std::vector<at::Generator> made;
    for (int i = 0; i < settings().devices; ++i) {
      made.push_back(make_generator(i));
    }
    return made;
  }());
  return all.at(device_or_current(device));
}

at::Generator kernel_generator(const std::optional<at::Generator>& given, int device) {
  const auto generator = given && given->defined() ? *given : default_generator(device);
  TORCH_CHECK(generator.device().type() == kType, "emulated: a generator of ", generator.device(),
              " cannot draw on device ", device);
  auto* drawn = static_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  std::lock_guard lock(drawn->mutex_);
  return at::make_generator<at::CPUGeneratorImpl>(drawn->next());
}

}  // namespace emulated
