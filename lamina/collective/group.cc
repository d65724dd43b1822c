// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lamina/base/error.h"
#include "lamina/base/hash.h"
#include "lamina/base/str.h"
#include "lamina/collective/backend.h"
#include "lamina/collective/hierarchical.h"
#include "lamina/collective/shared_memory_backend.h"
#include "lamina/device/capabilities.h"
#include "lamina/value/dtype.h"
#include "lamina/value/torch_version.h"

namespace lamina::collective {
namespace {

using c10d::ReduceOp;

ReduceOp operator_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum:
      return ReduceOp::SUM;
    case Reduction::kProduct:
      return ReduceOp::PRODUCT;
    case Reduction::kMin:
      return ReduceOp::MIN;
    case Reduction::kMax:
      return ReduceOp::MAX;
    case Reduction::kBitAnd:
      return ReduceOp::BAND;
    case Reduction::kBitOr:
      return ReduceOp::BOR;
    case Reduction::kBitXor:
      return ReduceOp::BXOR;
  }
  throw base::UsageError("no such reduction");
}

constexpr auto kGloo = "gloo";
// How long collectives that are under way may take to end, when somebody asks whether the group is stuck, and how often
// that is looked at.
constexpr auto kEndsSoon = std::chrono::milliseconds(250), kLook = std::chrono::milliseconds(5);
constexpr int kTag = 0;  // sends and receives of two members go in order

template <class Options>
Options options_for(const CallOptions& call_options) {
  Options options;
  options.timeout = backend_timeout(call_options);
  return options;
}

// Gloo's reduce_scatter is an all_reduce: it sends twice as much, and nobody can give it up. So every member sends the
// others their parts, and sums the parts that it has received.
class SumOfParts : public Work {
 public:
  SumOfParts(Started begun, at::Tensor parts, at::Tensor sum)
      : begun_(std::move(begun)), parts_(std::move(parts)), sum_(std::move(sum)) {}
  bool done() override { return begun_->done(); }
  void wait() override {
    begun_->wait();
    const at::NoGradGuard no_grad;
    at::sum_out(sum_, parts_, /*dim=*/0, /*keepdim=*/false, sum_.scalar_type());
  }

 private:
  const Started begun_;
  const at::Tensor parts_;
  at::Tensor sum_;
};

class C10dGroup : public Group {
 public:
  // `told_apart`: whether its collectives are told apart by what they are for; not where members may leave them.
  C10dGroup(c10::intrusive_ptr<c10d::ProcessGroup> group, Membership membership, JobLinks links, bool told_apart = true)
      : group_(std::move(group)),
        membership_(std::move(membership)),
        links_(std::move(links)),
        told_apart_(told_apart) {
    const auto own = std::ranges::find(membership_.members, membership_.self);
    rank_ = static_cast<int>(own - membership_.members.begin());
  }

  const std::vector<base::Rank>& members() const override { return membership_.members; }
  int rank() const override { return rank_; }
  bool stuck() const override {
    const auto deadline = base::Deadline::after(kEndsSoon);
    while (*left_ > 0 && !deadline.expired()) std::this_thread::sleep_for(kLook);
    return *left_ > 0;
  }

  std::unique_ptr<Group> apart(const std::string& name) override {
    if (leavable() == nullptr) return nullptr;
    const BackendOptions options{.store = c10::make_intrusive<c10d::PrefixStore>(name, group_->getStore()),
                                 .rank = rank_,
                                 .members = membership_.members,
                                 .timeout = backend()->getBackendOptions()->timeout,
                                 .check_interrupt = [mailbox = links_.mailbox, members = membership_.members] {
                                   if (mailbox == nullptr) return;
                                   if (const auto loss = mailbox->loss(members, {}))
                                     throw base::PeerError(loss->text(), loss);
                                 }};
    const auto own = make_backend(options);
    if (dynamic_cast<Leavable*>(own.get()) == nullptr) return nullptr;  // on any member
    auto named = membership_;
    named.name = base::str(membership_.name, ", ", name);
    return std::make_unique<C10dGroup>(make_group(options, own), std::move(named), links_, /*told_apart=*/false);
  }
  std::int64_t begun() const override { return static_cast<std::int64_t>(leavable()->begun()); }
  std::int64_t abandon() override { return static_cast<std::int64_t>(leavable()->abandon()); }
  void resume_at(std::int64_t number) override {
    leavable()->resume_at(static_cast<std::uint64_t>(number));
    if (links_.presence != nullptr) links_.presence->skip_to({membership_.name, membership_.members}, number);
  }

  bool shares_memory() const override { return memory_sharing() != nullptr; }
  std::optional<shared_memory::Segment> share(std::size_t bytes, const CallOptions& call_options) override {
    if (!shares_memory()) return {};
    return std::move(memory_sharing()->share(bytes, base::Deadline::after(call_options.patience.timeout)).front());
  }

  Started all_reduce(at::Tensor tensor, Reduction reduction, CallOptions call_options) override {
    auto options = options_for<c10d::AllreduceOptions>(call_options);
    options.reduceOp = operator_of(reduction);
    std::vector<at::Tensor> tensors{tensor};
    return start("all_reduce", {tensor}, call_options, [&] { return group_->allreduce(tensors, options); });
  }

  Started reduce(at::Tensor tensor, Reduction reduction, int root, CallOptions call_options) override {
    require_member("reduce", root);
    auto options = options_for<c10d::ReduceOptions>(call_options);
    options.reduceOp = operator_of(reduction);
    options.rootRank = root;
    std::vector<at::Tensor> tensors{tensor};
    return start("reduce", {tensor}, call_options, [&] { return group_->reduce(tensors, options); });
  }

  Started broadcast(at::Tensor tensor, int root, CallOptions call_options) override {
    require_member("broadcast", root);
    auto options = options_for<c10d::BroadcastOptions>(call_options);
    options.rootRank = root;
    std::vector<at::Tensor> tensors{tensor};
    return start("broadcast", {tensor}, call_options, [&] { return group_->broadcast(tensors, options); }, from(root));
  }

  Started all_gather(at::Tensor all, at::Tensor mine, CallOptions call_options) override {
    require_parts("all_gather", all, mine);
    flatten(all, mine);
    const auto options = options_for<c10d::AllgatherOptions>(call_options);
    return start("all_gather", {all, mine}, call_options,
                 [&] { return (group_.get()->*value::kAllGather)(all, mine, options); });
  }

  Started reduce_scatter(at::Tensor mine, at::Tensor all, Reduction reduction, CallOptions call_options) override {
    const bool adds_halves = reduction == Reduction::kSum && all.defined() && value::is_half(all.scalar_type());
    const bool widens = adds_halves && mine.scalar_type() == at::kFloat;
    require_parts("reduce_scatter", all, mine, /*of_one_type=*/!widens);
    flatten(all, mine);
    if (widens && (by_levels(all) || mine.numel() == 0)) {  // levels sum in float32, and round what they have summed
      auto rounded = at::empty({1, mine.numel()}, all.options());
      auto begun = reduce_scatter(rounded, all, reduction, std::move(call_options));
      return std::make_unique<SumOfParts>(std::move(begun), std::move(rounded), std::move(mine));
    }
    const bool over_gloo = devices::is_host(mine) && backend()->getBackendName() == kGloo;
    if (widens || (reduction == Reduction::kSum && over_gloo && mine.numel() > 0)) {
      auto parts = at::empty({size(), mine.numel()}, all.options());
      auto begun = exchange("reduce_scatter", parts, all.view({size(), -1}), call_options, {});
      return std::make_unique<SumOfParts>(std::move(begun), std::move(parts), std::move(mine));
    }
    auto options = options_for<c10d::ReduceScatterOptions>(call_options);
    options.reduceOp = operator_of(reduction);
    const auto begin = [&] { return (group_.get()->*value::kReduceScatter)(mine, all, options); };
    return start("reduce_scatter", {all, mine}, call_options, begin);
  }

  Started all_to_all(at::Tensor received, at::Tensor sent, CallOptions call_options, Rows rows) override {
    require_rows(received, rows.received);
    require_rows(sent, rows.sent);
    return exchange("all_to_all", std::move(received), std::move(sent), call_options, std::move(rows));
  }

  Started gather(at::Tensor all, at::Tensor mine, int root, CallOptions call_options) override {
    require_member("gather", root);
    auto options = options_for<c10d::GatherOptions>(call_options);
    options.rootRank = root;
    std::vector<std::vector<at::Tensor>> outputs;
    if (rank_ == root) outputs.push_back(parts("gather", all, mine));
    std::vector<at::Tensor> inputs{mine};
    return start(
        "gather", {mine, all}, call_options, [&] { return group_->gather(outputs, inputs, options); }, from(root));
  }

  Started scatter(at::Tensor mine, at::Tensor all, int root, CallOptions call_options) override {
    require_member("scatter", root);
    auto options = options_for<c10d::ScatterOptions>(call_options);
    options.rootRank = root;
    std::vector<std::vector<at::Tensor>> inputs;
    if (rank_ == root) inputs.push_back(parts("scatter", all, mine));
    std::vector<at::Tensor> outputs{mine};
    return start(
        "scatter", {mine, all}, call_options, [&] { return group_->scatter(outputs, inputs, options); }, from(root));
  }

  Started send(at::Tensor tensor, int to, CallOptions call_options) override {
    require_other("send", to);
    return pass("send", rank_, to, tensor, std::move(call_options),
                [&](std::vector<at::Tensor>& one) { return group_->send(one, to, kTag); });
  }

  Started receive(at::Tensor tensor, int from, CallOptions call_options) override {
    require_other("receive", from);
    return pass("receive", from, rank_, tensor, std::move(call_options),
                [&](std::vector<at::Tensor>& one) { return group_->recv(one, from, kTag); });
  }

  Started barrier(CallOptions call_options) override {
    const auto options = options_for<c10d::BarrierOptions>(call_options);
    return start("barrier", {}, call_options, [&] { return group_->barrier(options); });
  }

 private:
  template <class Begin>
  Started start(const char* operation, std::vector<at::Tensor> tensors, const CallOptions& call_options,
                const Begin& begin, std::vector<base::Rank> awaited = {}) {
    if (awaited.empty()) awaited = membership_.members;
    const auto bytes = largest(tensors);
    auto meaning = told_apart_ ? base::str(call_options.purpose, ", ", operation) : "";
    if (told_apart_) announce(call_options.purpose + call_options.about, meaning + call_options.about);
    C10dWorkOptions options{operation,
                            {membership_.name, membership_.members},
                            std::move(meaning),
                            membership_.self,
                            std::move(awaited),
                            std::move(tensors),
                            bytes,
                            left_};
    return start_work(std::move(options), links_, call_options, begin);
  }

  Started exchange(const char* operation, at::Tensor received, at::Tensor sent, const CallOptions& call_options,
                   Rows rows) {
    const auto options = options_for<c10d::AllToAllOptions>(call_options);
    const auto begin = [&] {
      return (group_.get()->*value::kAllToAll)(received, sent, rows.received, rows.sent, options);
    };
    return start(operation, {sent, received}, call_options, begin);
  }

  // From one member to another; what goes there is counted apart.
  template <class Begin>
  Started pass(const char* operation, int from, int to, const at::Tensor& tensor, CallOptions call_options,
               const Begin& begin) {
    const auto name = base::str(membership_.name, ", ", from, " to ", to);
    std::vector<base::Rank> ends{membership_.members[std::min(from, to)], membership_.members[std::max(from, to)]};
    std::vector<at::Tensor> tensors{tensor};
    C10dWorkOptions options{operation, {name, ends}, "", membership_.self, ends, tensors, largest(tensors), left_};
    return start_work(std::move(options), links_, std::move(call_options), [&] { return begin(tensors); });
  }

  // Says to the backend what the next collective is: members that begin different ones are not to mix them up.
  void announce(const std::string& purpose, const std::string& meaning) {
    if (!carrier_) {
      try {
        carrier_ = backend().get();
      } catch (const c10::Error&) {  // of devices alone
        carrier_ = nullptr;
      }
    }
    if (*carrier_ == nullptr) return;
    if (auto* purposeful = dynamic_cast<Purposeful*>(*carrier_)) {
      purposeful->set_purpose(purpose);
    } else {
      number_next(**carrier_, static_cast<std::uint32_t>(base::hash64(base::str(++begun_, " ", meaning))));
    }
  }

  bool by_levels(const at::Tensor& tensor) const {
    return group_->getBackend(tensor.device().type())->getBackendName() == kByLevels;
  }
  c10::intrusive_ptr<c10d::Backend> backend() const { return group_->getBackend(devices::kHost); }
  MemorySharing* memory_sharing() const { return dynamic_cast<MemorySharing*>(backend().get()); }
  Leavable* leavable() const { return dynamic_cast<Leavable*>(backend().get()); }

  static std::int64_t largest(const std::vector<at::Tensor>& tensors) {
    std::int64_t bytes = 0;
    for (const auto& tensor : tensors) {
      if (tensor.defined()) bytes = std::max(bytes, static_cast<std::int64_t>(tensor.nbytes()));
    }
    return bytes;
  }

  // The members whose parts this one needs where `root` gives or takes all. The root needs those of the others, should
  // its tensor be large, and the others need the root's.
  std::vector<base::Rank> from(int root) const {
    return rank_ == root ? membership_.members : std::vector{membership_.members[root]};
  }

  // Backends take shapes of few kinds.
  static void flatten(at::Tensor& all, at::Tensor& mine) {
    all = all.view({-1});
    mine = mine.view({-1});
  }

  std::vector<at::Tensor> parts(const char* operation, const at::Tensor& all, const at::Tensor& mine) const {
    require_parts(operation, all, mine);
    std::vector<at::Tensor> parts;
    const auto flat = all.view({-1});
    for (int i = 0; i < size(); ++i) parts.push_back(flat.narrow(0, i * mine.numel(), mine.numel()).view(mine.sizes()));
    return parts;
  }

  void require_member(const char* operation, int member) const {
    if (member >= 0 && member < size()) return;
    throw base::UsageError(base::str(operation, " over ", membership_.name, ": there is no member ", member,
                                     "; expected 0 to ", size() - 1));
  }

  void require_other(const char* operation, int member) const {
    require_member(operation, member);
    if (member == rank_)
      throw base::UsageError(base::str(operation, " over ", membership_.name, ": to this rank itself"));
  }

  void require_parts(const char* operation, const at::Tensor& all, const at::Tensor& mine,
                     bool of_one_type = true) const {
    const bool fits = all.defined() && all.numel() == size() * mine.numel();
    if (fits && (!of_one_type || all.scalar_type() == mine.scalar_type())) return;
    const auto given = all.defined() ? all.numel() : 0;
    throw base::UsageError(base::str(operation, " over ", membership_.name, ": a tensor of ", given, " elements for ",
                                     size(), " parts of ", mine.numel(), ", of one type"));
  }

  void require_rows(const at::Tensor& tensor, const std::vector<std::int64_t>& rows) const {
    std::int64_t sum = 0;
    for (const auto each : rows) sum += each;
    const auto count = tensor.dim() == 0 ? 0 : tensor.size(0);
    if (rows.empty() ? count % size() == 0 : std::cmp_equal(rows.size(), size()) && sum == count) return;
    throw base::UsageError(base::str("all_to_all over ", membership_.name, ": ", count, " rows cannot be parted over ",
                                     size(), " members ", rows.empty() ? "equally" : "as is asked for"));
  }

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const Membership membership_;
  const JobLinks links_;
  const std::shared_ptr<std::atomic<int>> left_ = std::make_shared<std::atomic<int>>(0);
  const bool told_apart_;
  std::optional<c10d::Backend*> carrier_;  // of tensors of the CPU, once it is known
  std::int64_t begun_ = 0;
  int rank_ = 0;
};

}  // namespace

std::unique_ptr<Group> wrap(c10::intrusive_ptr<c10d::ProcessGroup> group, Membership membership, JobLinks links) {
  return std::make_unique<C10dGroup>(std::move(group), std::move(membership), std::move(links));
}

}  // namespace lamina::collective
