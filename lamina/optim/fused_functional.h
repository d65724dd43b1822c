// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/fused/update.h"
#include "lamina/optim/functional.h"

namespace lamina::optim {

// A rule over memory as an optimizer of tensors: real or complex ones, whose numbers are pairs of reals, on the CPU.
// What lies in another order than its parameter, or is no dense block, goes through a dense copy.
class FusedFunctional final : public Functional {
 public:
  // `rule` outlives it.
  explicit FusedFunctional(const fused::Rule& rule) : rule_(rule) {}

  const Declaration& declaration() const override { return rule_.declaration; }
  void check(Hyper hyper) const override { fused::check(rule_, hyper); }
  void measure(const Step& step, std::span<Update> updates, Threads& threads) const override;
  void update(const Step& step, std::span<Update> updates, Threads& threads) const override;

 private:
  const fused::Rule& rule_;
};

}  // namespace lamina::optim
