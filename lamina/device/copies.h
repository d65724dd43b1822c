// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <memory>
#include <optional>

#include "lamina/device/streams.h"

// [Note: staging] What goes from a device to another rank goes through pinned memory of the host. It leaves the device
// on a stream of its own, from a snapshot that the stream of the sender has made: so the sender computes on, and may
// write to it. Memory that nobody else has needs no snapshot. What arrives comes to the device on another stream. It
// counts as there when that copy is enqueued: whoever reads it first has its stream wait (`join_arrivals`). No thread
// that computes waits.
namespace lamina::devices {

// Bytes of the device on their way to the host. The stream of this thread has made them.
class CopyOut {
 public:
  // `is_alone`: nobody writes to them any more, from now on.
  explicit CopyOut(const at::Tensor& bytes, bool is_alone = false);

  // Contiguous, of the same type and shape; read when the copy has passed().
  const at::Tensor& host() const { return host_; }
  bool passed() const { return copied_->passed(); }  // throws what the device has failed with

 private:
  at::Tensor host_;
  std::optional<Mark> copied_;  // made on the stream of the copy
};

// Bytes of the device that a transport reads or writes by itself: see [Note: lent memory].
class LentBytes {
 public:
  // A snapshot of what the stream of this thread has made. `is_alone`: as of CopyOut; then it is no copy.
  static LentBytes of(const at::Tensor& bytes, bool is_alone);
  // Memory for what comes from another rank, and counts as arrived. Throws c10::OutOfMemoryError.
  static LentBytes room(std::int64_t size);

  const at::Tensor& bytes() const { return bytes_; }
  // From then on nothing before it in a stream touches them. Throws what the device has failed with.
  bool are_ready() const { return ready_.passed(); }

 private:
  explicit LentBytes(at::Tensor bytes);

  at::Tensor bytes_;
  Mark ready_;
};

// A copy between the rank's device and pinned memory of the host, beside what is computed. It begins where the stream
// of this thread now is. That stream waits for it before either memory is let go of, so the next to have the memory
// comes later. The host waits for nothing.
class CopyBeside {
 public:
  static std::unique_ptr<CopyBeside> out(const at::Tensor& tensor);
  static std::unique_ptr<CopyBeside> in(const at::Tensor& host);
  ~CopyBeside();
  CopyBeside(const CopyBeside&) = delete;

  // Has the stream of this thread wait for the copy, lets go of the original, and returns the copy.
  at::Tensor end();

 private:
  CopyBeside(at::Tensor from, at::Tensor to, const c10::Stream& on);

  at::Tensor from_, to_;
  const c10::Stream stream_;  // of the thread that began it
  c10::Event copied_;
};

// Memory of the host that is copied from and to the rank's device beside what the host does.
at::Tensor pinned_bytes(std::int64_t size);

// The tensor on the rank's device, its copy enqueued. From any thread.
at::Tensor copy_in(const at::Tensor& host);

// Has the stream of this thread wait for what has arrived so far: for every thread that begins to compute, or goes on
// after it has waited for another rank. Waits for nothing itself; on the host there is nothing to do.
void join_arrivals();
// Does so for a tensor that may have arrived, and that the stream of this thread is to read, whichever it is.
void join_arrival(const at::Tensor& tensor);

// Steps compute on the stream of this thread from now on.
void compute_on_this_stream();

}  // namespace lamina::devices
