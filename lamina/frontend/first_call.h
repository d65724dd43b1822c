// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <optional>
#include <utility>

#include <memory>
#include "lamina/frontend/calls.h"

namespace lamina::frontend {

// The way of a call before the model is cut: a part of it that is called before the model has it cut first. See
// [Note: first call].
class FirstCall : public Router {
 public:
  // `cut` returns when the model is cut, and calls have another way.
  explicit FirstCall(std::function<void()> cut) : cut_(std::move(cut)) {}

  std::optional<ModulePlace> find(const torch::nn::Module* module) override {
    cut_();
    Router* const next = router();
    return next == nullptr || next == this ? std::nullopt : next->find(module);
  }
  value::Value call(base::ModuleId, std::int64_t, value::Value) override { return {}; }
  std::unique_ptr<Scope> enter(base::ModuleId) override { return nullptr; }

 private:
  const std::function<void()> cut_;
};

}  // namespace lamina::frontend
