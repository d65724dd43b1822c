// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ops/maximum.h>

#include <barrier>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "lamina/collective/process_group.h"

namespace lamina::data_parallel {

// Replicas of a model as threads of this process.
class ReplicaThreads {
 public:
  explicit ReplicaThreads(int size) : tensors_(size), everyone_(size) {}

  // Runs `replica(index, group)` in a thread each; rethrows the first replica's error, all of which must have failed.
  void run(const std::function<void(int, collective::ProcessGroup&)>& replica) {
    std::vector<std::exception_ptr> errors(tensors_.size());
    std::vector<std::jthread> threads;
    for (int i = 0; i < size(); ++i) {
      threads.emplace_back([&, i] {
        Member member(*this, i);
        try {
          replica(i, member);
        } catch (...) {
          errors[i] = std::current_exception();
        }
      });
    }
    threads.clear();
    if (errors.front()) std::rethrow_exception(errors.front());
  }

  // The group of one of them, for threads of another's.
  std::unique_ptr<collective::ProcessGroup> member(int index) { return std::make_unique<Member>(*this, index); }

  int size() const { return static_cast<int>(tensors_.size()); }
  int collectives() const { return collectives_; }  // so far

 private:
  class Member : public collective::ProcessGroup {
   public:
    Member(ReplicaThreads& all, int index) : all_(all), index_(index) {}

    int size() const override { return all_.size(); }
    void sum(at::Tensor& tensor) override {
      combine(tensor, [](const at::Tensor& a, const at::Tensor& b) { return a + b; });
    }
    void max(at::Tensor& tensor) override { combine(tensor, at::maximum); }
    void broadcast(at::Tensor& tensor, int root) override {
      at::Tensor mine = index_ == root ? tensor.clone() : tensor.clone().zero_();
      combine(mine, [](const at::Tensor& a, const at::Tensor& b) { return a + b; });
      tensor.copy_(mine);
    }

   private:
    void combine(at::Tensor& tensor, const std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>& pair) {
      all_.tensors_[index_] = tensor;
      all_.everyone_.arrive_and_wait();
      auto result = all_.tensors_[0].clone();
      for (int i = 1; i < size(); ++i) result = pair(result, all_.tensors_[i]);
      if (index_ == 0) ++all_.collectives_;
      all_.everyone_.arrive_and_wait();
      tensor.copy_(result);
    }

    ReplicaThreads& all_;
    const int index_;
  };

  std::vector<at::Tensor> tensors_;
  std::barrier<> everyone_;
  int collectives_ = 0;
};

}  // namespace lamina::data_parallel
