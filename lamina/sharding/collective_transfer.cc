// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clone.h>
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
#include "lamina/value/guarded.h"

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

  void expect(std::span<const std::size_t> parameters) override {
    const std::lock_guard lock(mutex_);
    begin_values(parameters);
  }

  void expect_nothing() override {
    const std::lock_guard lock(mutex_);
    end_coming(patience_);
  }

  std::vector<c10::DataPtr> values(std::span<const std::size_t> parameters) override {
    const std::lock_guard lock(mutex_);
    begin_values(parameters);
    std::vector<c10::DataPtr> values;
    for (const auto parameter : parameters) {
      const auto gathering = std::move(coming_.extract(parameter).mapped());
      await(*gathering, patience_);
      values.push_back(value::memory_that_keeps(value_of(*gathering, parameter)));
    }
    return values;
  }

  at::Tensor copy(std::size_t parameter) override {
    const std::lock_guard lock(mutex_);
    begin_lacking();
    auto gathering = begin_gather({parameter}, kCopies);
    await(gathering, patience_);
    return gathering.result.narrow(0, 0, own_[parameter].spec.numel);
  }

  void give(std::size_t parameter, at::Tensor gradient, std::int64_t /*pass*/) override {
    const std::lock_guard lock(mutex_);
    const auto& spec = own_.at(parameter).spec;
    const auto most = std::min(bucket_elements_,
                               static_cast<std::int64_t>(kMostBytesUnderWay / c10::elementSize(spec.gradient_type())));
    const bool fits =
        bucket_.empty() || (own_[bucket_.front().first].spec.gradient_type() == spec.gradient_type() &&
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
    end_coming(patience);
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
    std::vector<std::size_t> parameters;
    std::int64_t number = 0;  // in the members' order
    bool ended = false;
  };
  static constexpr std::size_t kBucketsAtOnce = 2;
  // Words for what a collective is about.
  static constexpr auto kGradients = "gradients", kValues = "values", kCopies = "copies";

  // Tells the others of a collective, and how this member waits for it.
  std::int64_t say(const char* what, std::span<const std::size_t> parameters) {
    return order_ ? order_->begin({what, {parameters.begin(), parameters.end()}}) : 0;
  }
  collective::CallOptions options(const char* purpose, const base::Patience& patience, std::int64_t number,
                                  std::span<const std::size_t> parameters) {
    std::string about;
    for (const auto parameter : parameters) about += base::str(" ", parameter);
    return {purpose, order_ ? order_->watched(number, patience) : patience, /*outlives_wait=*/true, std::move(about),
            /*keeps_turn=*/true};
  }

  void await(Begun& begun, const base::Patience& patience) {
    if (begun.ended) return;
    if (order_) order_->check(begun.number, patience);
    begun.work->wait();
    if (order_) order_->note_end(begun.number);
    begun.ended = true;
  }

  // See [Note: collectives given up]. Nobody wants the results of these.
  void begin_lacking() {
    if (!order_) return;
    for (const auto& lacking : order_->lacking(patience_)) {
      std::vector<std::size_t> parameters(lacking.numbers.begin(), lacking.numbers.end());
      if (lacking.what == kGradients) {
        const auto zeros = zeros_for(parameters);
        begin_sum(std::move(parameters), zeros, patience_);
      } else {
        begin_gather(std::move(parameters), lacking.what.c_str());
      }
    }
  }

  // Begins with those that do not come already, in one collective for each type and device.
  void begin_values(std::span<const std::size_t> parameters) {
    std::vector<std::vector<std::size_t>> alike;
    for (const auto parameter : parameters) {
      if (coming_.contains(parameter)) continue;
      const auto has_type = [&](const auto& others) { return are_alike(others.front(), parameter); };
      const auto found = std::ranges::find_if(alike, has_type);
      (found == alike.end() ? alike.emplace_back() : *found).push_back(parameter);
    }
    if (!alike.empty()) begin_lacking();
    for (auto& each : alike) {
      const auto gathering = std::make_shared<Begun>(begin_gather(std::move(each), kValues));
      for (const auto parameter : gathering->parameters) coming_.emplace(parameter, gathering);
    }
  }

  void end_coming(const base::Patience& patience) {
    for (auto& [parameter, gathering] : std::exchange(coming_, {})) await(*gathering, patience);
  }

  bool are_alike(std::size_t one, std::size_t other) const {
    const auto &first = own_.at(one).spec, &second = own_.at(other).spec;
    return first.dtype == second.dtype && first.device == second.device;
  }

  // The shards of several parameters lie behind each other; each member's follow those of the one before.
  Begun begin_gather(std::vector<std::size_t> parameters, const char* what) {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> shards;
    for (const auto parameter : parameters) shards.push_back(own_.at(parameter).shard.detach());
    const auto own = shards.size() == 1 ? shards.front() : at::cat(shards);
    Begun begun;
    begun.result = at::empty({own.numel() * group_.size()}, own.options().requires_grad(false));
    begun.number = say(what, parameters);
    begun.work =
        group_.all_gather(begun.result, own, options("gathering parameters", patience_, begun.number, parameters));
    begun.parameters = std::move(parameters);
    return begun;
  }

  // One of those that were gathered, in memory of its own.
  at::Tensor value_of(const Begun& gathering, std::size_t parameter) const {
    if (gathering.parameters.size() == 1) return gathering.result;
    const at::NoGradGuard no_grad;
    std::int64_t at = 0;
    for (const auto each : gathering.parameters) {
      if (each == parameter) break;
      at += own_[each].shard.numel();
    }
    const auto by_member = gathering.result.view({group_.size(), -1});
    return by_member.narrow(1, at, own_[parameter].shard.numel()).clone(at::MemoryFormat::Contiguous);
  }

  // All shards of the first member, of the second one, ...
  at::Tensor zeros_for(std::span<const std::size_t> parameters) {
    std::int64_t shards = 0;
    for (const auto parameter : parameters) shards += own_.at(parameter).shard.numel();
    const auto& first = own_.at(parameters.front()).spec;
    return at::zeros({group_.size(), shards}, at::TensorOptions(first.gradient_type()).device(first.device));
  }

  void send_bucket(const base::Patience& patience) {
    if (bucket_.empty()) return;
    const at::NoGradGuard no_grad;
    const value::Unguarded own_work;
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

  Begun begin_sum(std::vector<std::size_t> parameters, const at::Tensor& all, const base::Patience& patience) {
    const at::NoGradGuard no_grad;
    Begun bucket;
    const auto& first = own_.at(parameters.front()).spec;
    const auto type = first.travels ? c10::promoteTypes(*first.travels, at::kFloat) : all.scalar_type();
    bucket.result = at::empty({all.size(1)}, all.options().dtype(type));
    bucket.number = say(kGradients, parameters);
    bucket.work = group_.reduce_scatter(bucket.result, all.view({-1}), collective::Reduction::kSum,
                                        options("summing gradients", patience, bucket.number, parameters));
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
  std::map<std::size_t, std::shared_ptr<Begun>> coming_;
  std::vector<std::pair<std::size_t, at::Tensor>> bucket_;
  std::int64_t in_bucket_ = 0;  // elements
  std::deque<Begun> sent_;
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
