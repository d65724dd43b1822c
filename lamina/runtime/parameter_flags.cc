// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/parameter_flags.h"

#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/faces/sayings.h"
#include "lamina/value/bytes.h"

namespace lamina::runtime {
namespace {

// Not requires_grad(), which a buffer gains by being written to.
bool says(const at::Tensor& tensor) {
  const auto* meta = tensor.defined() ? torch::autograd::impl::get_autograd_meta(tensor) : nullptr;
  return meta != nullptr && meta->requires_grad_;
}

}  // namespace

ParameterFlags::ParameterFlags(std::shared_ptr<const Watched> watched) : watched_(std::move(watched)) {
  for (const auto& tensor : watched_->tensors) at_begin_.push_back(says(tensor));
  now_ = at_begin_;
}

void ParameterFlags::end(Flags set) {
  read(nullptr);
  install(set);
}

void ParameterFlags::install(const Flags& flags) {
  if (flags == installed_) return;
  installed_ = flags;
  for (std::size_t i = 0; i < now_.size(); ++i) {
    const bool wanted = this->wanted(i);
    if (now_[i] == wanted) continue;
    watched_->tensors[i].set_requires_grad(wanted);
    now_[i] = wanted;
  }
}

bool ParameterFlags::wanted(std::size_t number) const {
  if (installed_) {
    const auto found = installed_->find(static_cast<std::int64_t>(number));
    if (found != installed_->end()) return watched_->tensors[number].defined() && found->second;
  }
  return at_begin_[number];
}

ParameterFlags::Flags ParameterFlags::read(Flags flags) {
  std::shared_ptr<std::map<std::int64_t, bool>> more;
  for (std::size_t i = 0; i < now_.size(); ++i) {
    const bool found = says(watched_->tensors[i]);
    if (found == now_[i]) continue;
    if (!more)
      more = flags ? std::make_shared<std::map<std::int64_t, bool>>(*flags)
                   : std::make_shared<std::map<std::int64_t, bool>>();
    (*more)[static_cast<std::int64_t>(i)] = now_[i] = found;
  }
  if (!more) return flags;
  installed_ = more;
  return more;
}

void ParameterFlags::adopt() {
  for (std::size_t i = 0; i < now_.size(); ++i) {
    const bool found = says(watched_->tensors[i]);
    if (found != now_[i]) at_begin_[i] = now_[i] = found;
  }
}

std::string ParameterFlags::difference(const Flags& a, const Flags& b) const {
  if (a == b) return "";
  const auto value = [&](const Flags& flags, std::size_t i) {
    const auto found = flags ? flags->find(static_cast<std::int64_t>(i)) : decltype(flags->end())();
    return flags && found != flags->end() ? found->second : static_cast<bool>(at_begin_[i]);
  };
  for (std::size_t i = 0; i < at_begin_.size(); ++i) {
    if (value(a, i) != value(b, i)) return watched_->names[i];
  }
  return "";
}

ParameterFlags::Flags ParameterFlags::begin_body(base::Microbatch microbatch) {
  const auto later = left_.lower_bound(microbatch);
  return began_[microbatch] = later == left_.begin() ? nullptr : std::prev(later)->second;
}

void ParameterFlags::end_body(base::Microbatch microbatch, const Flags& left) {
  left_[microbatch] = left;
  const auto next = began_.upper_bound(microbatch);
  if (next == began_.end()) return;
  if (const auto name = difference(next->second, left); !name.empty()) {
    const auto text = faces::said("left-changed", name + " with another requires_grad",
                                  "it at the beginning of the body, before any call of the model", "it");
    throw base::UsageError(text, base::Code{"step-frozen"});
  }
}

bool ParameterFlags::keeps_others(base::Microbatch microbatch, const Flags& flags) const {
  return microbatch == base::Microbatch(0) && !left_.contains(microbatch) && began_.size() == 1 &&
         !difference(flags, nullptr).empty();
}

ParameterFlags::Flags ParameterFlags::left_by(base::Microbatch microbatch) const {
  const auto found = left_.find(microbatch);
  return found == left_.end() ? nullptr : found->second;
}

std::string ParameterFlags::to_bytes(const Flags& flags) {
  value::Writer out;
  if (!flags) return out.take();
  for (const auto& [number, set] : *flags) out.put<std::uint32_t>(static_cast<std::uint32_t>(number) << 1 | set);
  return out.take();
}

ParameterFlags::Flags ParameterFlags::from_bytes(std::string_view bytes) const {
  if (bytes.empty()) return nullptr;
  auto flags = std::make_shared<std::map<std::int64_t, bool>>();
  value::Reader in(bytes);
  for (std::size_t left = bytes.size() / sizeof(std::uint32_t); left > 0; --left) {
    const auto one = in.get<std::uint32_t>();
    if (one >> 1 >= at_begin_.size()) throw base::FormatError("a flag of a parameter that is none");
    (*flags)[one >> 1] = (one & 1) != 0;
  }
  in.expect_end();
  return flags;
}

}  // namespace lamina::runtime
