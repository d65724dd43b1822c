// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/activity.h"

#include "lamina/pipeline/remote_calls.h"

namespace lamina::pipeline {
namespace {

thread_local Activity* this_thread = nullptr;

}  // namespace

Activity::Activity(ComputeSlot& slot, base::Step step, base::Microbatch microbatch, plan::Phase begin)
    : slot_(slot),
      step_(step),
      microbatch_(microbatch),
      outer_(this_thread),
      leads_(begin == plan::Phase::kStart),
      in_backward_(begin == plan::Phase::kBackward),
      issued_(std::make_shared<Issued>()) {
  acquire(begin);
  this_thread = this;
}

Activity::~Activity() {
  this_thread = outer_;
  end_forward();
  if (leads_) slot_.finished();
  release();
}

Activity* Activity::current() { return this_thread; }

void Activity::end_forward() {
  if (leads_ && !std::exchange(forward_ended_, true)) slot_.forward_done();
}

void Activity::queue_again(plan::Phase phase) {
  if (!std::exchange(holds_, false)) return acquire(phase);
  slot_.queue_again(phase, microbatch_);
  holds_ = true;
}

void Activity::retire() {
  release();
  retired_ = true;
}

void Activity::acquire(plan::Phase phase) {
  if (retired_) return;
  slot_.acquire(phase, microbatch_);
  holds_ = true;
}

void Activity::release() {
  // Code that swallows the end of its step may come here again without the slot, which is then another's.
  if (std::exchange(holds_, false)) slot_.release();
}

}  // namespace lamina::pipeline
