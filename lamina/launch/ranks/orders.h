// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "lamina/base/fd.h"

namespace lamina::launch {

// What the command tells the guardian through their pipe: the signals that it got. Its end closes with the command,
// however that dies.
class Orders {
 public:
  explicit Orders(base::Fd pipe);

  int fd() const { return pipe_.get(); }  // readable when there is an order, or the command is gone
  std::optional<int> next();              // the next signal, or nothing; never blocks
  bool abandoned() const { return abandoned_; }

 private:
  base::Fd pipe_;
  bool abandoned_ = false;
};

}  // namespace lamina::launch
