// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/ivalue_inl.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

namespace lamina::collective {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Several works as one. (torch's own, made of a future, keeps errors to itself.)
class JointWork : public c10d::Work {
 public:
  explicit JointWork(std::vector<WorkPtr> works) : Work(-1, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::ranges::all_of(works_, [](const auto& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::ranges::all_of(works_, [](const auto& work) { return work->isSuccess(); });
  }
  // Returns, and throws the first error, when all have ended: until then tensors are written to.
  bool wait(std::chrono::milliseconds timeout) override {
    std::exception_ptr first;
    for (const auto& work : works_) {
      try {
        work->wait(timeout);
      } catch (...) {
        if (!first) first = std::current_exception();
      }
    }
    if (first) std::rethrow_exception(first);
    return true;
  }
  void abort() override {
    for (const auto& work : works_) work->abort();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
        c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
    for (const auto& work : works_) futures.push_back(work->getFuture());
    return c10::collectAll(futures);
  }

 private:
  const std::vector<WorkPtr> works_;
};

}  // namespace lamina::collective
