// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/staged_backend.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "lamina/collective/backend_arguments.h"
#include "lamina/collective/lane.h"
#include "lamina/device/capabilities.h"
#include "lamina/device/copies.h"

namespace lamina::collective {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using shared_memory::Check;

constexpr auto kLook = std::chrono::microseconds(50);  // how often what is under way is looked at

// Tensors of the device, and what stands for them on the host.
struct Staged {
  Tensors there, here;
};

class StagedWork : public c10d::Work {
 public:
  StagedWork(c10d::OpType type, LaneWorkPtr on_host, Staged written)
      : Work(-1, type), on_host_(std::move(on_host)), written_(std::move(written)) {}

  bool isCompleted() override { return on_host_->isCompleted(); }
  bool isSuccess() const override { return on_host_->isSuccess(); }
  std::exception_ptr exception() const override { return on_host_->exception(); }
  void synchronize() override { wait(kNoTimeout); }
  void abort() override { on_host_->abort(); }
  Tensors result() override { return written_.there; }
  // Ends when the host has the result; wait() brings it to the device.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return on_host_->getFuture(); }

  bool wait(std::chrono::milliseconds timeout) override {
    on_host_->wait(timeout);
    const std::lock_guard lock(mutex_);
    const auto written = std::exchange(written_.here, {});
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView writes_to_leaves;
    for (std::size_t i = 0; i < written.size(); ++i) written_.there[i].copy_(written[i], /*non_blocking=*/true);
    return true;
  }

 private:
  const LaneWorkPtr on_host_;
  std::mutex mutex_;  // of the copies back, which are made once
  Staged written_;
};

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

class StagedBackend : public c10d::Backend {
 public:
  StagedBackend(c10::intrusive_ptr<c10d::Backend> inner, std::chrono::milliseconds timeout)
      : Backend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)),
        timeout_(timeout),
        together_(std::make_shared<Lane>()) {
    for (auto* lanes : {&to_, &from_}) {
      for (int i = 0; i < size_; ++i) lanes->push_back(std::make_shared<Lane>());
    }
  }
  ~StagedBackend() override {
    abort();
    each_lane([](Lane& lane) { lane.close(); });
  }

  const std::string getBackendName() const override { return "staged"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(getBackendName(), timeout_);
  }
  std::uint64_t getSequenceNumberForGroup() override { return started_; }
  void setSequenceNumberForGroup() override {}

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return in_place(kBroadcast, tensors, options,
                    [options](auto& inner, Tensors& each) { return inner.broadcast(each, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return in_place(kAllReduce, tensors, options,
                    [options](auto& inner, Tensors& each) { return inner.allreduce(each, options); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return in_place(kAllReduceCoalesced, tensors, options,
                    [options](auto& inner, Tensors& each) { return inner.allreduce_coalesced(each, options); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return in_place(kReduce, tensors, options,
                    [options](auto& inner, Tensors& each) { return inner.reduce(each, options); });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return start(kAllGather, flat(outputs), inputs, options, [options](auto& inner, Tensors& written, Tensors& read) {
      std::vector<Tensors> lists{written};
      return inner.allgather(lists, read, options);
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return start(kAllGatherTensor, {output}, {input}, options, [options](auto& inner, Tensors& written, Tensors& read) {
      return inner._allgather_base(written[0], read[0], options);
    });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return start(kAllGatherCoalesced, outputs, inputs, options,
                 [options](auto& inner, Tensors& written, Tensors& read) {
                   return inner.allgather_into_tensor_coalesced(written, read, options);
                 });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return start(kReduceScatter, outputs, flat(inputs), options,
                 [options](auto& inner, Tensors& written, Tensors& read) {
                   std::vector<Tensors> lists{read};
                   return inner.reduce_scatter(written, lists, options);
                 });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return start(kReduceScatterTensor, {output}, {input}, options,
                 [options](auto& inner, Tensors& written, Tensors& read) {
                   return inner._reduce_scatter_base(written[0], read[0], options);
                 });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return start(kReduceScatterCoalesced, outputs, inputs, options,
                 [options](auto& inner, Tensors& written, Tensors& read) {
                   return inner.reduce_scatter_tensor_coalesced(written, read, options);
                 });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return start(kGather, flat(outputs), inputs, options, [options](auto& inner, Tensors& written, Tensors& read) {
      std::vector<Tensors> lists;
      if (!written.empty()) lists.push_back(written);
      return inner.gather(lists, read, options);
    });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return start(kScatter, outputs, flat(inputs), options, [options](auto& inner, Tensors& written, Tensors& read) {
      std::vector<Tensors> lists;
      if (!read.empty()) lists.push_back(read);
      return inner.scatter(written, lists, options);
    });
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return start(kAllToAll, outputs, inputs, options, [options](auto& inner, Tensors& written, Tensors& read) {
      return inner.alltoall(written, read, options);
    });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_rows,
                        std::vector<std::int64_t>& input_rows, const c10d::AllToAllOptions& options) override {
    return start(kAllToAllTensor, {output}, {input}, options,
                 [options, output_rows, input_rows](auto& inner, Tensors& written, Tensors& read) mutable {
                   return inner.alltoall_base(written[0], read[0], output_rows, input_rows, options);
                 });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return start(kBarrier, {}, {}, options,
                 [](auto& inner, Tensors&, Tensors&) { return inner.barrier(c10d::BarrierOptions()); });
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return queue(*to_.at(static_cast<std::size_t>(to)), kSend, {}, tensors, timeout_,
                 [to, tag](auto& inner, Tensors&, Tensors& read) { return inner.send(read, to, tag); });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return queue(*from_.at(static_cast<std::size_t>(from)), kReceive, tensors, {}, timeout_,
                 [from, tag](auto& inner, Tensors& written, Tensors&) { return inner.recv(written, from, tag); });
  }

  void abort() override {
    each_lane([](Lane& lane) { lane.abort(); });
    inner_->abort();
  }
  void shutdown() override {
    each_lane([](Lane& lane) { lane.drain(); });
    each_lane([](Lane& lane) { lane.close(); });
    inner_->shutdown();
  }

 private:
  template <class Call>
  void each_lane(const Call& call) {
    call(*together_);
    for (const auto* lanes : {&to_, &from_}) {
      for (const auto& lane : *lanes) call(*lane);
    }
  }

  template <class Options>
  std::chrono::milliseconds timeout(const Options& options) const {
    return options.timeout == c10d::kUnsetTimeout ? timeout_ : options.timeout;
  }

  template <class Options, class Begin>
  WorkPtr start(CollectiveKind kind, Tensors written, Tensors read, const Options& options, Begin begin) {
    ++started_;
    return queue(*together_, kind, std::move(written), std::move(read), timeout(options), std::move(begin));
  }

  // Reads and writes the same tensors.
  template <class Options, class Begin>
  WorkPtr in_place(CollectiveKind kind, const Tensors& tensors, const Options& options, Begin begin) {
    ++started_;
    auto copies = copied_out(tensors);
    Tensors here;
    for (const auto& copy : *copies) here.push_back(copy.host());
    return run_staged(*together_, kind, {tensors, here}, std::move(copies), timeout(options),
                      [begin, here](auto& inner) mutable { return begin(inner, here); });
  }

  template <class Begin>
  WorkPtr queue(Lane& lane, CollectiveKind kind, Tensors written, const Tensors& read,
                std::chrono::milliseconds timeout, Begin begin) {
    auto copies = copied_out(read);
    Tensors from, into;
    for (const auto& copy : *copies) from.push_back(copy.host());
    for (const auto& tensor : written) {
      into.push_back(at::empty(tensor.sizes(), tensor.options().device(devices::kHost).pinned_memory(true)));
    }
    return run_staged(lane, kind, {std::move(written), into}, std::move(copies), timeout,
                      [begin, into, from](auto& inner) mutable { return begin(inner, into, from); });
  }

  using Copies = std::shared_ptr<std::vector<devices::CopyOut>>;
  static Copies copied_out(const Tensors& tensors) {
    auto copies = std::make_shared<std::vector<devices::CopyOut>>();
    for (const auto& tensor : tensors) copies->emplace_back(tensor.detach());
    return copies;
  }

  using Begun = std::function<WorkPtr(c10d::Backend& inner)>;
  WorkPtr run_staged(Lane& lane, CollectiveKind kind, Staged written, Copies copies, std::chrono::milliseconds timeout,
                     Begun begin) {
    const bool ends_in_waits = kind.type == c10d::OpType::SEND || kind.type == c10d::OpType::RECV;  // as Gloo's do
    const auto run = [this, copies = std::move(copies), begin = std::move(begin), ends_in_waits](const Check& check) {
      for (const auto& copy : *copies) {
        look_until([&] { return copy.passed(); }, "what this rank's device has to compute before", check);
      }
      const auto work = begin(*inner_);
      if (!ends_in_waits) look_until([&] { return work->isCompleted(); }, "one of the others", check);
      work->wait();
    };
    auto on_host = c10::make_intrusive<LaneWork>(
        LaneOperation{kind.type, kind.name, written.here, timeout, /*synchronous=*/false, nullptr, run});
    lane.run(on_host, /*here=*/false);
    return c10::make_intrusive<StagedWork>(kind.type, std::move(on_host), std::move(written));
  }

  template <class Ended>
  static void look_until(const Ended& ended, const char* awaited, const Check& check) {
    while (!ended()) {
      check(awaited);
      std::this_thread::sleep_for(kLook);
    }
  }

  const c10::intrusive_ptr<c10d::Backend> inner_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<Lane> together_;          // of the collectives
  std::vector<std::shared_ptr<Lane>> to_, from_;  // by member
  std::atomic<std::uint64_t> started_ = 0;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_staged_backend(c10::intrusive_ptr<c10d::Backend> inner,
                                                      std::chrono::milliseconds timeout) {
  return c10::make_intrusive<StagedBackend>(std::move(inner), timeout);
}

}  // namespace lamina::collective
