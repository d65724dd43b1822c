// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "lamina/fused/rule.h"
#include "lamina/optim/functional.h"

namespace lamina::optim {

enum class Pass : std::uint8_t { kMeasure, kUpdate };

// The two passes of a rule that has operations on arrays ([Note: values]), over tensors of any device. The updates have
// gradients, and are checked.

// The first pass.
class WholeNorms {
 public:
  // Waits for no device. The updates outlive this.
  void measure(const fused::Rule& rule, const Step& step, std::span<Update* const> updates);
  // Gives all that were measured their norms. Waits once for each device.
  void read();

 private:
  // Norms of pieces, a number each on one device, with what they are of, and which of its norms it is.
  struct Piece {
    Update* update;
    std::size_t norm;
    fused::Combine combine;
  };
  struct Measured {
    std::vector<at::Tensor> norms;
    std::vector<Piece> pieces;
  };

  Measured& on(at::Device device);

  std::vector<Measured> devices_;
};

// The second one, which waits for no device. `by_torch`: where torch has an operation for all of an update on a device,
// it is taken.
void update_whole_tensors(const fused::Rule& rule, const Step& step, std::span<Update* const> updates, bool by_torch);

}  // namespace lamina::optim
