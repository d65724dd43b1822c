// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/fused/update.h"
#include "lamina/optim/functional.h"

namespace lamina::optim {

// The way in which tensors are updated: those of the CPU in one loop over their memory, others by operations on whole
// tensors.
enum class Way : std::uint8_t {
  kByDevice,
  kWholeTensors,           // all of them
  kWholeTensorsByTheRule,  // and torch's own operations for an update are not taken
};

// A rule as an optimizer of real or complex tensors, on any device; a complex number is updated as two reals. Only to
// measure norms does it wait for a device other than the CPU, once for all groups. A gradient or state that lies in
// another order than its parameter, or is no dense block, goes through a dense copy.
class FusedFunctional final : public Functional {
 public:
  // `rule` outlives it.
  explicit FusedFunctional(const fused::Rule& rule, Way way = Way::kByDevice) : rule_(rule), way_(way) {}

  const Declaration& declaration() const override { return rule_.declaration; }
  void check(Hyper hyper) const override { fused::check(rule_, hyper); }
  using Functional::measure;
  void measure(std::span<const StepOf> groups, Threads& threads) const override;
  void update(const Step& step, std::span<Update> updates, Threads& threads) const override;

 private:
  const fused::Rule& rule_;
  const Way way_;
};

}  // namespace lamina::optim
