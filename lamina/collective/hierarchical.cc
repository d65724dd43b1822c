// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/hierarchical.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>

#include <atomic>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/collective/lane.h"
#include "lamina/device/capabilities.h"
#include "lamina/value/torch_version.h"

namespace lamina::collective {
namespace {

using c10d::OpType;
using shared_memory::Check;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class HierarchicalBackend : public c10d::Backend {
 public:
  HierarchicalBackend(Levels levels, std::chrono::milliseconds timeout)
      : Backend(levels.across->getRank() * levels.within->getSize() + levels.within->getRank(),
                levels.across->getSize() * levels.within->getSize()),
        levels_(std::move(levels)),
        hosts_(levels_.across->getSize()),
        locals_(levels_.within->getSize()),
        timeout_(timeout) {}
  ~HierarchicalBackend() override { lane_->close(); }

  const std::string getBackendName() const override { return kByLevels; }

  WorkPtr _allgather_base(at::Tensor& all, at::Tensor& mine, const c10d::AllgatherOptions& options) override {
    require_parts("all_gather", all, mine);
    if (levels_.flat) {
      const auto why_flat = why_too_large(levels_.limits, size_, static_cast<std::int64_t>(mine.nbytes()));
      if (!why_flat.empty()) {
        tell_flat(why_flat);
        return (levels_.flat.get()->*value::kAllGather)(all, mine, options);
      }
    }
    return start(
        OpType::_ALLGATHER_BASE, "lamina:all_gather", all, options,
        [this, all, mine](const auto& timed, const Check& check) { return all_gather(all, mine, timed, check); });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& mine, at::Tensor& all, const c10d::ReduceScatterOptions& options) override {
    require_parts("reduce_scatter", all, mine);
    return start(OpType::_REDUCE_SCATTER_BASE, "lamina:reduce_scatter", mine, options,
                 [this, all, mine](const auto& timed, const Check&) { return reduce_scatter(mine, all, timed); });
  }

  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    if (tensors.size() != 1) throw base::UsageError("all_reduce by levels takes one tensor");
    require_contiguous("all_reduce", tensors.front());
    return start(
        OpType::ALLREDUCE, "lamina:all_reduce", tensors.front(), options,
        [this, tensor = tensors.front()](const auto& timed, const Check&) { return all_reduce(tensor, timed); });
  }

  // Each part goes from one member to one other: levels would send none of them less often.
  WorkPtr alltoall_base(at::Tensor& received, at::Tensor& sent, std::vector<std::int64_t>& received_rows,
                        std::vector<std::int64_t>& sent_rows, const c10d::AllToAllOptions& options) override {
    if (!levels_.flat) throw base::UsageError("all_to_all by levels goes over a flat group, and there is none");
    return (levels_.flat.get()->*value::kAllToAll)(received, sent, received_rows, sent_rows, options);
  }

  // A member crosses when all of its host have come.
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return start(OpType::BARRIER, "lamina:barrier", {}, options, [this](const auto& timed, const Check&) {
      levels_.within->barrier(timed)->wait();
      return levels_.across->barrier(timed);
    });
  }

 private:
  // Begins all stages of an operation and returns the last one. A stage begins when the one before has ended; of
  // tensors of a device that is for its stream to see to, which `wait` tells so.
  template <class Options, class Stages>
  WorkPtr start(OpType type, const char* name, const at::Tensor& result, Options options, Stages stages) {
    if (options.timeout == c10d::kUnsetTimeout) options.timeout = timeout_;
    if (result.defined() && !devices::is_host(result)) return stages(options, Check());
    const auto run = [stages = std::move(stages), options](const Check& check) {
      check({});
      if (const auto last = stages(options, check)) last->wait();
    };
    const auto results = result.defined() ? std::vector<at::Tensor>{result} : std::vector<at::Tensor>();
    auto work = c10::make_intrusive<LaneWork>(
        LaneOperation{type, name, results, options.timeout, /*synchronous=*/false, /*check_interrupt=*/{}, run});
    lane_->run(work, /*here=*/false);
    return work;
  }

  void tell_flat(const std::string& why) {
    if (rank_ != 0 || told_flat_.exchange(true)) return;
    base::log_warning(base::str("an all-gather between hosts goes flat, over the plain backend: ", why));
  }

  // A part of each host's member of this index comes to its place in `all`; from there each host's parts come to
  // theirs.
  WorkPtr all_gather(const at::Tensor& all, const at::Tensor& mine, const c10d::AllgatherOptions& options,
                     const Check& check) {
    const auto parts = all.view({hosts_, locals_, mine.numel()});
    std::vector<at::Tensor> of_hosts, own, input{mine.view({-1})};
    for (std::int64_t host = 0; host < hosts_; ++host) {
      of_hosts.push_back(parts.select(0, host).view({-1}));
      own.push_back(parts.select(0, host).select(0, levels_.within->getRank()));
    }
    if (levels_.posted && devices::is_host(mine)) {
      levels_.posted->run(own, input.front(), check);
    } else {
      std::vector<std::vector<at::Tensor>> outputs{own};
      levels_.across->allgather(outputs, input, options)->wait();
    }
    return (levels_.within.get()->*value::kAllGatherAll)(of_hosts, own, options);
  }

  WorkPtr reduce_scatter(const at::Tensor& mine, const at::Tensor& all, const c10d::ReduceScatterOptions& options) {
    const auto parts = all.view({hosts_, locals_ * mine.numel()});
    auto sums = at::empty({hosts_, mine.numel()}, mine.options());  // of this host's members
    auto of_hosts = parts.unbind(0), own = sums.unbind(0);
    (levels_.within.get()->*value::kReduceScatterAll)(own, of_hosts, options)->wait();
    auto flat = mine.view({-1});
    if (!devices::is_host(mine) || options.reduceOp != c10d::ReduceOp::SUM) {
      auto flat_sums = sums.view({-1});
      return (levels_.across.get()->*value::kReduceScatter)(flat, flat_sums, options);
    }
    // Gloo's reduce_scatter is an all_reduce, which sends twice as much.
    auto received = at::empty_like(sums);
    std::vector<std::int64_t> equal;
    (levels_.across.get()->*value::kAllToAll)(received, sums, equal, equal, {.timeout = options.timeout})->wait();
    at::sum_out(flat, received, /*dim=*/0);
    return nullptr;
  }

  // Each member sums a k-th across; the few elements that are left over go whole.
  WorkPtr all_reduce(const at::Tensor& tensor, const c10d::AllreduceOptions& options) {
    const auto flat = tensor.view({-1});
    const auto each = flat.numel() / locals_, even = each * locals_;
    WorkPtr last;
    if (even < flat.numel()) {
      std::vector<at::Tensor> rest{flat.narrow(0, even, flat.numel() - even)};
      levels_.within->allreduce(rest, options)->wait();
      last = levels_.across->allreduce(rest, options);
      if (each == 0) return last;
      last->wait();
    }
    if (each == 0) return nullptr;
    auto all = flat.narrow(0, 0, even), mine = at::empty({each}, flat.options());
    c10d::ReduceScatterOptions how;
    how.reduceOp = options.reduceOp;
    how.timeout = options.timeout;
    (levels_.within.get()->*value::kReduceScatter)(mine, all, how)->wait();
    std::vector<at::Tensor> across{mine};
    levels_.across->allreduce(across, options)->wait();
    c10d::AllgatherOptions gather;
    gather.timeout = options.timeout;
    return (levels_.within.get()->*value::kAllGather)(all, mine, gather);
  }

  static void require_contiguous(const char* operation, const at::Tensor& tensor) {
    if (tensor.defined() && tensor.layout() == at::kStrided && tensor.is_contiguous()) return;
    throw base::UsageError(base::str(operation, " by levels takes dense contiguous tensors"));
  }

  void require_parts(const char* operation, const at::Tensor& all, const at::Tensor& mine) const {
    require_contiguous(operation, all);
    require_contiguous(operation, mine);
    if (all.numel() == size_ * mine.numel() && all.scalar_type() == mine.scalar_type()) return;
    throw base::UsageError(base::str(operation, " by levels: a tensor of ", all.numel(), " elements for ", size_,
                                     " parts of ", mine.numel(), ", of one type"));
  }

  const Levels levels_;
  const std::int64_t hosts_, locals_;
  const std::chrono::milliseconds timeout_;
  std::atomic<bool> told_flat_ = false;
  const std::shared_ptr<Lane> lane_ = std::make_shared<Lane>();
};

}  // namespace

c10::intrusive_ptr<c10d::ProcessGroup> make_hierarchical(Levels levels, std::chrono::milliseconds timeout) {
  constexpr auto kOwn = c10d::ProcessGroup::BackendType::CUSTOM;
  const auto backend = c10::make_intrusive<HierarchicalBackend>(std::move(levels), timeout);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(backend->getRank(), backend->getSize());
  for (const auto device : {devices::kHost, c10::DeviceType::CUDA}) group->setBackend(device, kOwn, backend);
  group->setDefaultBackend(kOwn);
  return group;
}

}  // namespace lamina::collective
