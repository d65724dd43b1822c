// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ops/maximum.h>

#include <barrier>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/collective/group.h"

namespace lamina::data_parallel {

// Replicas of a model as threads of this process.
class ReplicaThreads {
 public:
  class Member;
  explicit ReplicaThreads(int size) : tensors_(size), everyone_(size) {}

  // Runs `replica(index, group)` in a thread each; rethrows the first replica's error, all of which must have failed.
  void run(const std::function<void(int, collective::Group&)>& replica) {
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
  std::unique_ptr<Member> member(int index) { return std::make_unique<Member>(*this, index); }

  int size() const { return static_cast<int>(tensors_.size()); }
  int collectives() const { return collectives_; }  // so far

  class Member : public collective::Group {
   public:
    Member(ReplicaThreads& all, int index) : all_(all), index_(index) {
      for (int rank = 0; rank < all.size(); ++rank) members_.emplace_back(rank);
    }

    const std::vector<base::Rank>& members() const override { return members_; }
    int rank() const override { return index_; }
    collective::Started all_reduce(at::Tensor tensor, collective::Reduction reduction,
                                   collective::CallOptions options) override {
      purposes.push_back(options.purpose);
      const bool sums = reduction == collective::Reduction::kSum;
      combine(tensor, [sums](const at::Tensor& a, const at::Tensor& b) { return sums ? a + b : at::maximum(a, b); });
      return std::make_unique<Done>();
    }
    collective::Started broadcast(at::Tensor tensor, int root, collective::CallOptions options) override {
      purposes.push_back(options.purpose);
      at::Tensor mine = index_ == root ? tensor.clone() : tensor.clone().zero_();
      combine(mine, [](const at::Tensor& a, const at::Tensor& b) { return a + b; });
      tensor.copy_(mine);
      return std::make_unique<Done>();
    }

    std::vector<std::string> purposes;  // of its collectives, so far

    // A reducer starts no other collectives.
    using Tensor = at::Tensor;
    using Reduction = collective::Reduction;
    using CallOptions = collective::CallOptions;
    using Started = collective::Started;
    Started reduce(Tensor, Reduction, int, CallOptions) override { return none(); }
    Started all_gather(Tensor, Tensor, CallOptions) override { return none(); }
    Started reduce_scatter(Tensor, Tensor, Reduction, CallOptions) override { return none(); }
    Started all_to_all(Tensor, Tensor, CallOptions, collective::Rows) override { return none(); }
    Started gather(Tensor, Tensor, int, CallOptions) override { return none(); }
    Started scatter(Tensor, Tensor, int, CallOptions) override { return none(); }
    Started send(Tensor, int, CallOptions) override { return none(); }
    Started receive(Tensor, int, CallOptions) override { return none(); }
    Started barrier(CallOptions) override { return none(); }

   private:
    struct Done : collective::Work {
      bool done() override { return true; }
      void wait() override {}
    };

    static Started none() { throw base::UsageError("another collective than a reducer's"); }
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
    std::vector<base::Rank> members_;
  };

 private:
  std::vector<at::Tensor> tensors_;
  std::barrier<> everyone_;
  int collectives_ = 0;
};

}  // namespace lamina::data_parallel
