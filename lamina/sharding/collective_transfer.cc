// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <span>

#include "lamina/base/str.h"
#include "lamina/sharding/sums.h"
#include "lamina/sharding/transfer.h"
#include "lamina/value/away.h"

namespace lamina::sharding {
namespace {

// Over collectives, which all members make in one order: values come, and gradients go, as the same program asks for
// them on each. Gradients travel in buckets, in the order in which they come.
class CollectiveTransfer : public Transfer {
 public:
  CollectiveTransfer(const std::vector<Spec>& parameters, std::int64_t bucket_elements, collective::Group& group,
                     base::Patience patience, std::unique_ptr<collective::SameOrder> order)
      : bucket_elements_(bucket_elements),
        group_(group),
        patience_(std::move(patience)),
        order_(std::move(order)),
        sums_(parameters, group.size()) {
    for (const auto& each : parameters) {
      const auto options = at::TensorOptions(each.dtype).device(each.device);
      own_.push_back({each, at::zeros({each.shard_numel(group.size())}, options), {}});
    }
  }

  at::Tensor shard(std::size_t parameter) override { return own_.at(parameter).shard; }

  void expect(std::size_t parameter) override {
    const std::lock_guard lock(mutex_);
    if (!coming_.contains(parameter)) coming_.emplace(parameter, gather(parameter, "values"));
  }

  c10::DataPtr value(std::size_t parameter) override {
    const std::lock_guard lock(mutex_);
    auto found = coming_.extract(parameter);
    auto begun = found ? std::move(found.mapped()) : gather(parameter, "values");
    await(begun, patience_);
    return value::memory_that_keeps(std::move(begun.result));
  }

  at::Tensor copy(std::size_t parameter) override {
    const std::lock_guard lock(mutex_);
    auto begun = gather(parameter, "copies");
    await(begun, patience_);
    return begun.result.narrow(0, 0, own_[parameter].spec.numel);
  }

  void give(std::size_t parameter, at::Tensor gradient, std::int64_t /*pass*/) override {
    const std::lock_guard lock(mutex_);
    const auto& spec = own_.at(parameter).spec;
    const auto most =
        std::min(bucket_elements_, static_cast<std::int64_t>(kMostBytesUnderWay / c10::elementSize(spec.dtype)));
    const bool fits =
        bucket_.empty() || (own_[bucket_.front().first].spec.dtype == spec.dtype &&
                            own_[bucket_.front().first].spec.device == spec.device && in_bucket_ + spec.numel <= most);
    if (!fits) send_bucket(patience_);
    in_bucket_ += spec.numel;
    bucket_.emplace_back(parameter, std::move(gradient));
    if (in_bucket_ >= most) send_bucket(patience_);
  }

  void reduce(std::int64_t /*pass*/, const base::Patience& patience) override {
    const std::lock_guard lock(mutex_);
    send_bucket(patience);
    while (!sent_.empty()) take_bucket(patience);
    for (auto& [parameter, begun] : std::exchange(coming_, {})) await(begun, patience);
  }

  at::Tensor take_sum(std::size_t parameter) override {
    const std::lock_guard lock(mutex_);
    return std::exchange(own_.at(parameter).sum, {});
  }

  void abandon(const value::Failure& failure) override {
    const std::lock_guard lock(mutex_);
    bucket_.clear();
    in_bucket_ = 0;
    sent_.clear();
    coming_.clear();
    for (auto& own : own_) own.sum.reset();
    if (order_) order_->give_up(failure);
  }

  void end_together(const std::optional<value::Failure>& failure) override {
    const std::lock_guard lock(mutex_);
    if (!order_) return;
    if (failure) coming_.clear();
    try {
      order_->end_together(failure, patience_);
    } catch (...) {
      coming_.clear();
      throw;
    }
  }

  void require_nobody_failed() override {
    const std::unique_lock lock(mutex_, std::try_to_lock);  // who has it waits in a collective, and finds the same
    if (lock && order_) order_->require_nobody_gave_up();
  }

  void catch_up() override {
    const std::lock_guard lock(mutex_);
    begin_lacking();
  }

 private:
  struct State {
    Spec spec;
    at::Tensor shard;
    at::Tensor sum;
  };
  struct Begun {
    at::Tensor result;
    collective::Started work;
    std::int64_t number = 0;  // in the members' order
  };
  struct Bucket : Begun {
    std::vector<std::size_t> parameters;
  };
  static constexpr std::size_t kBucketsAtOnce = 2;
  static constexpr auto kGradients = "gradients";  // what a collective is about

  // Tells the others of a collective, and how this member waits for it.
  std::int64_t say(const char* what, std::span<const std::size_t> parameters) {
    return order_ ? order_->begin({what, {parameters.begin(), parameters.end()}}) : 0;
  }
  collective::Terms terms(const char* purpose, const base::Patience& patience, std::int64_t number,
                          std::span<const std::size_t> parameters) {
    std::string about;
    for (const auto parameter : parameters) about += base::str(" ", parameter);
    return {purpose, order_ ? order_->watched(number, patience) : patience, /*outlives_wait=*/true, std::move(about),
            /*keeps_turn=*/true};
  }

  void await(Begun& begun, const base::Patience& patience) {
    if (order_) order_->check(begun.number, patience);
    begun.work->wait();
    if (order_) order_->note_end(begun.number);
  }

  // See [Note: collectives given up]. Nobody wants the results of these.
  void begin_lacking() {
    if (!order_) return;
    for (const auto& [what, numbers] : order_->lacking(patience_)) {
      const std::vector<std::size_t> parameters(numbers.begin(), numbers.end());
      if (what == kGradients) {
        begin_sum(parameters, zeros_for(parameters), patience_);
      } else {
        begin_gather(parameters.front(), what.c_str());
      }
    }
  }

  Begun gather(std::size_t parameter, const char* what) {
    begin_lacking();
    return begin_gather(parameter, what);
  }

  Begun begin_gather(std::size_t parameter, const char* what) {
    const at::NoGradGuard no_grad;
    const auto& own = own_.at(parameter);
    auto all = at::empty({own.shard.numel() * group_.size()}, own.shard.options().requires_grad(false));
    const auto number = say(what, {&parameter, 1});
    auto work =
        group_.all_gather(all, own.shard.detach(), terms("gathering parameters", patience_, number, {&parameter, 1}));
    return {std::move(all), std::move(work), number};
  }

  // All shards of the first member, of the second one, ...
  at::Tensor zeros_for(std::span<const std::size_t> parameters) {
    std::int64_t shards = 0;
    for (const auto parameter : parameters) shards += own_.at(parameter).shard.numel();
    return at::zeros({group_.size(), shards}, own_.at(parameters.front()).shard.options().requires_grad(false));
  }

  void send_bucket(const base::Patience& patience) {
    if (bucket_.empty()) return;
    const at::NoGradGuard no_grad;
    begin_lacking();
    while (sent_.size() >= kBucketsAtOnce) take_bucket(patience);
    std::vector<std::size_t> parameters;
    for (const auto& [parameter, gradient] : bucket_) parameters.push_back(parameter);
    const auto all = zeros_for(parameters);
    std::int64_t at = 0;
    for (const auto& [parameter, gradient] : bucket_) {
      const auto flat = gradient.reshape({-1});
      for (int member = 0; member < group_.size(); ++member) {
        const auto share = own_[parameter].spec.share(group_.size(), member);
        if (share.count() == 0) break;
        all.select(0, member).narrow(0, at, share.count()).copy_(flat.narrow(0, share.begin, share.count()));
      }
      at += own_[parameter].shard.numel();
    }
    bucket_.clear();
    in_bucket_ = 0;
    sent_.push_back(begin_sum(std::move(parameters), all, patience));
  }

  Bucket begin_sum(std::vector<std::size_t> parameters, const at::Tensor& all, const base::Patience& patience) {
    const at::NoGradGuard no_grad;
    Bucket bucket;
    bucket.result = at::empty({all.size(1)}, all.options());
    bucket.number = say(kGradients, parameters);
    bucket.work = group_.reduce_scatter(bucket.result, all.view({-1}), collective::Reduction::kSum,
                                        terms("summing gradients", patience, bucket.number, parameters));
    bucket.parameters = std::move(parameters);
    return bucket;
  }

  void take_bucket(const base::Patience& patience) {
    const at::NoGradGuard no_grad;
    auto bucket = std::move(sent_.front());
    sent_.pop_front();
    await(bucket, patience);
    std::int64_t at = 0;
    for (const auto parameter : bucket.parameters) {
      auto& own = own_[parameter];
      const auto part = bucket.result.narrow(0, at, own.shard.numel());
      at += own.shard.numel();
      own.sum = own.sum.defined() ? own.sum.add_(part) : sums_.take(parameter).copy_(part);
    }
  }

  const std::int64_t bucket_elements_;
  collective::Group& group_;
  const base::Patience patience_;
  std::mutex mutex_;
  const std::unique_ptr<collective::SameOrder> order_;
  Sums sums_;
  std::vector<State> own_;
  std::map<std::size_t, Begun> coming_;
  std::vector<std::pair<std::size_t, at::Tensor>> bucket_;
  std::int64_t in_bucket_ = 0;  // elements
  std::deque<Bucket> sent_;
};

}  // namespace

collective::SameOrder::Words words_of(std::vector<std::string> names) {
  const auto in_words = [names = std::move(names)](const collective::SameOrder::Operation& operation) {
    constexpr std::ptrdiff_t kMostNames = 3;
    auto text = operation.what;
    const auto count = std::ssize(operation.numbers);
    for (std::ptrdiff_t i = 0; i < std::min(count, kMostNames); ++i) {
      text += base::str(i == 0 ? " of " : ", ", names.at(static_cast<std::size_t>(operation.numbers[i])));
    }
    return count <= kMostNames ? text : base::str(text, " and ", count - kMostNames, " more");
  };
  const auto error = [](const std::string& difference) {
    return base::DesyncError(
        difference + ": ranks of a sharding group that share no memory call the same modules in the same order",
        base::Code{"shard-order"});
  };
  return {"shards", in_words, error};
}

std::unique_ptr<Transfer> make_collective_transfer(const std::vector<Spec>& parameters, std::int64_t bucket_elements,
                                                   collective::Group& group, const base::Patience& patience,
                                                   std::unique_ptr<collective::SameOrder> order) {
  return std::make_unique<CollectiveTransfer>(parameters, bucket_elements, group, patience, std::move(order));
}

}  // namespace lamina::sharding
