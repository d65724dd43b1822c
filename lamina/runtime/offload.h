// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace lamina::runtime {

// A copy between memories that was begun.
class Copying {
 public:
  virtual ~Copying() = default;
  // The copy, for what this thread gives its device from then on. The original is let go of.
  virtual at::Tensor end() = 0;
};

// Copies tensors between their device and the host.
class Mover {
 public:
  virtual ~Mover() = default;
  virtual bool moves(const at::Tensor& tensor) const = 0;  // it does not lie in the host's memory
  virtual std::unique_ptr<Copying> to_host(const at::Tensor& tensor) = 0;
  virtual std::unique_ptr<Copying> to_device(const at::Tensor& host) = 0;
};

// Between the rank's device and pinned memory, beside computation; see devices::CopyBeside.
std::shared_ptr<Mover> make_device_mover();

// [Note: offloading] The inputs that checkpoints keep for a backward go to the host's memory when they are kept and
// come back for the backward. Two leave at a time: when the next one is kept, the device lets go of the first of them,
// once that has left. The latest are needed first, so when one is taken the `horizon` ones kept before it begin to
// come. Thread-safe.
class Offload : public std::enable_shared_from_this<Offload> {
 public:
  Offload(int horizon, std::shared_ptr<Mover> mover) : horizon_(horizon), mover_(std::move(mover)) {}

  // One tensor that is kept, until this is let go of.
  class Kept {
   public:
    ~Kept();
    // Its value on its device; again and again where a graph is used more than once.
    at::Tensor take();

   private:
    friend class Offload;
    std::shared_ptr<Offload> offload_;
    std::int64_t number_ = 0;
  };

  // nullptr for a tensor that stays where it is.
  std::shared_ptr<Kept> keep(const at::Tensor& tensor);

 private:
  struct Activation {
    std::unique_ptr<Copying> leaving;  // until its memory is let go of
    at::Tensor host;
    std::unique_ptr<Copying> coming;
    void let_go();
    void begin_to_come(Mover& mover);
  };

  at::Tensor take(std::int64_t number);
  void forget(std::int64_t number);

  const int horizon_;
  const std::shared_ptr<Mover> mover_;
  std::mutex mutex_;
  std::int64_t next_ = 0;
  std::map<std::int64_t, Activation> kept_;  // by number, in the order in which they were kept
};

}  // namespace lamina::runtime
