// SPDX-License-Identifier: Apache-2.0
#include "tests/emulated/backend.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <thread>
#include <utility>

#include "tests/emulated/memory.h"
#include "tests/emulated/stream.h"
#include "tests/emulated/tensors.h"

namespace emulated {
namespace {

using namespace std::chrono_literals;

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// How long a shutdown waits for what was enqueued before it aborts that.
constexpr auto kLastCall = 2s;

// State that a backend, its works and the tasks in its streams share.
struct Life {
  std::atomic<bool> aborted = false;
  std::mutex mutex;
  WorkPtr exchange;  // a send or receive that a stream waits in

  bool is_over() const { return aborted || is_stopping(); }

  void abort() {
    std::lock_guard lock(mutex);
    aborted = true;
    if (exchange) {
      exchange->abort();
    }
  }
};

// Work of Gloo's, and what is left to do with its result.
struct Started {
  Started(WorkPtr work, std::function<void()> then = [] {}) : work(std::move(work)), then(std::move(then)) {}

  WorkPtr work;
  std::function<void()> then;
};

// A collective: the tensors that it writes, then those that it reads, and how Gloo does it with copies of them.
struct Operation {
  c10d::OpType type;
  Tensors written, read;
  std::function<Started(c10d::Backend& gloo, const Tensors& written, const Tensors& read)> start;

  bool is_exchange() const {
    return type == c10d::OpType::SEND || type == c10d::OpType::RECV || type == c10d::OpType::RECVANYSOURCE;
  }
};

// A kernel in the backend's stream: some operations that go on together.
class Kernel {
 public:
  Kernel(BackendPtr gloo, std::shared_ptr<Life> life, std::vector<Operation> operations)
      : gloo_(std::move(gloo)), life_(std::move(life)), operations_(std::move(operations)) {
    for (auto& operation : operations_) {
      for (auto* tensors : {&operation.written, &operation.read}) {
        for (auto& tensor : *tensors) {
          tensor = twin(tensor);
        }
      }
    }
  }

  void run() {
    if (life_->is_over()) {
      return;
    }
    std::vector<Started> works;
    for (auto& operation : operations_) {
      copies_.push_back({copied(operation.written), copied(operation.read)});
      works.push_back(operation.start(*gloo_, copies_.back().first, copies_.back().second));
    }
    if (all_end(works)) {
      return finish(works);
    }
    spin_until([] { return false; });
    leave(works);
  }

 private:
  static Tensors copied(const Tensors& tensors) {
    Tensors made;
    for (const auto& tensor : tensors) {
      made.push_back(tensor.clone(at::MemoryFormat::Contiguous));
    }
    return made;
  }

  template <typename Ended>
  void spin_until(Ended ended) {
    for (auto pause = 10us; !ended() && !life_->is_over();
         pause = std::min<std::chrono::microseconds>(2 * pause, 1ms)) {
      std::this_thread::sleep_for(pause);
    }
  }

  // False if the group was aborted, or a member is lost: NCCL's kernels do not know that either.
  bool all_end(const std::vector<Started>& works) {
    try {
      for (std::size_t i = 0; i < works.size(); ++i) {
        wait_for(works[i].work, operations_[i].is_exchange());
      }
      return !life_->is_over();
    } catch (const std::exception& error) {
      TORCH_WARN("emulatedccl: rank ", gloo_->getRank(), " waits for ever: ", error.what());
      return false;
    }
  }

  void wait_for(const WorkPtr& work, bool is_exchange) {
    if (!is_exchange) {
      spin_until([&] { return work->isCompleted(); });
      if (work->isCompleted()) {
        work->wait();  // throws what failed
      }
      return;
    }
    // Gloo's own complete within a wait.
    {
      std::lock_guard lock(life_->mutex);
      if (life_->aborted) {
        return;
      }
      life_->exchange = work;
    }
    work->wait();
    std::lock_guard lock(life_->mutex);
    life_->exchange.reset();
  }

  void finish(const std::vector<Started>& works) {
    for (std::size_t i = 0; i < works.size(); ++i) {
      works[i].then();
      for (std::size_t j = 0; j < operations_[i].written.size(); ++j) {
        operations_[i].written[j].copy_(copies_[i].first[j]);
      }
    }
  }

  // Gloo has no cancel: whatever it still does is left to it, with its memory.
  void leave(const std::vector<Started>& works) {
    new auto(copies_);
    new auto(gloo_);
    new auto(works);
    std::lock_guard lock(life_->mutex);
    life_->exchange.reset();
  }

  BackendPtr gloo_;
  std::shared_ptr<Life> life_;
  std::vector<Operation> operations_;
  std::vector<std::pair<Tensors, Tensors>> copies_;
};

class Collective final : public c10d::Work {
 public:
  Collective(int rank, c10d::OpType type, c10::Stream stream, Tensors written, std::shared_ptr<Life> life)
      : Work(rank, type), stream_(stream), written_(std::move(written)), life_(std::move(life)) {}

  // From now on it is enqueued.
  void enqueued() {
    Event::record(done_, stream_);
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector{stream_.device()});
    const c10::StreamGuard guard(stream_);
    future_->markCompleted(c10::IValue(written_));
  }

  bool isCompleted() override { return done_->query(); }
  bool isSuccess() const override { return !life_->aborted; }
  void synchronize() override { Event::block(done_, current_stream(stream_.device_index())); }
  void abort() override { life_->abort(); }
  Tensors result() override { return written_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (retrieveOpType() == c10d::OpType::BARRIER) {
      emulated::synchronize(current_stream(stream_.device_index()));
    }
    return true;
  }

 private:
  c10::Stream stream_;
  Tensors written_;
  std::shared_ptr<Life> life_;
  std::shared_ptr<Event> done_ = Event::make();
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& list : lists) {
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

class Backend final : public c10d::Backend {
 public:
  explicit Backend(BackendPtr gloo) : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  ~Backend() override { life_->abort(); }

  const std::string getBackendName() const override { return "emulatedccl"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return launched_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return launch({c10d::OpType::BROADCAST, tensors, {}, [options](auto& gloo, auto written, auto) {
                     return gloo.broadcast(written, options);
                   }});
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return launch({c10d::OpType::ALLREDUCE, tensors, {}, [options](auto& gloo, auto written, auto) {
                     return reduce_all(gloo, written[0], options);
                   }});
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return each(tensors.size(), [&](std::size_t i) {
      Tensors one{tensors[i]};
      return allreduce(one, options);
    });
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return launch({c10d::OpType::REDUCE, tensors, {}, [options](auto& gloo, auto written, auto) {
                     return gloo.reduce(written, options);
                   }});
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return launch({c10d::OpType::ALLGATHER, flat(outputs), inputs, [options](auto& gloo, auto written, auto read) {
                     std::vector<Tensors> lists{written};
                     return gloo.allgather(lists, read, options);
                   }});
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return launch({c10d::OpType::_ALLGATHER_BASE, {output}, {input}, [options](auto& gloo, auto written, auto read) {
                     return gloo._allgather_base(written[0], read[0], options);
                   }});
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return each(outputs.size(), [&](std::size_t i) { return _allgather_base(outputs[i], inputs[i], options); });
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return launch({c10d::OpType::GATHER, flat(outputs), inputs, [options](auto& gloo, auto written, auto read) {
                     std::vector<Tensors> lists;
                     if (!written.empty()) {
                       lists.push_back(written);
                     }
                     return gloo.gather(lists, read, options);
                   }});
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return launch({c10d::OpType::SCATTER, outputs, flat(inputs), [options](auto& gloo, auto written, auto read) {
                     std::vector<Tensors> lists;
                     if (!read.empty()) {
                       lists.push_back(read);
                     }
                     return gloo.scatter(written, lists, options);
                   }});
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return launch({c10d::OpType::REDUCE_SCATTER, outputs, flat(inputs), [options](auto& gloo, auto written, auto read) {
                     return reduce_and_scatter(gloo, written[0], at::cat(read), options);
                   }});
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return launch(
        {c10d::OpType::_REDUCE_SCATTER_BASE, {output}, {input}, [options](auto& gloo, auto written, auto read) {
           return reduce_and_scatter(gloo, written[0], read[0], options);
         }});
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return each(outputs.size(), [&](std::size_t i) { return _reduce_scatter_base(outputs[i], inputs[i], options); });
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                        std::vector<std::int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    return launch({c10d::OpType::ALLTOALL_BASE, {output}, {input}, [=](auto& gloo, auto written, auto read) mutable {
                     return gloo.alltoall_base(written[0], read[0], output_sizes, input_sizes, options);
                   }});
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return launch({c10d::OpType::ALLTOALL, outputs, inputs,
                   [options](auto& gloo, auto written, auto read) { return gloo.alltoall(written, read, options); }});
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return launch(
        {c10d::OpType::SEND, {}, tensors, [=](auto& gloo, auto, auto read) { return gloo.send(read, to, tag); }});
  }

  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return launch({c10d::OpType::RECV, tensors, {}, [=](auto& gloo, auto written, auto) {
                     return gloo.recv(written, from, tag);
                   }});
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    const auto bound = options.device ? options.device : getBoundDeviceId();
    const auto device = device_or_current(bound ? bound->index() : -1);
    const c10::StreamGuard guard(current_stream(device));
    const auto token = at::empty({1}, at::TensorOptions().device(guard.current_device()));
    return launch({c10d::OpType::BARRIER, {}, {token}, [](auto& gloo, auto, auto) {
                     return gloo.barrier(c10d::BarrierOptions());
                   }});
  }

  void startCoalescing() override { together_.emplace(); }

  WorkPtr endCoalescing() override {
    TORCH_CHECK(together_, "emulatedccl: endCoalescing without startCoalescing");
    const auto operations = std::exchange(together_, std::nullopt);
    return operations->empty() ? nullptr : launch(std::move(*operations));
  }

  void abort() override { life_->abort(); }

  void shutdown() override {
    const auto end = std::chrono::steady_clock::now() + kLastCall;
    for (const auto& [device, stream] : streams_) {
      while (!is_idle(stream) && std::chrono::steady_clock::now() < end) {
        std::this_thread::sleep_for(1ms);
      }
    }
    life_->abort();
  }

 private:
  // Sums, or what else the options say, over all ranks in place. Gloo has no average: that is a sum and a division.
  template <typename Options>
  static Started reduce_all(c10d::Backend& gloo, at::Tensor tensor, const Options& options) {
    const bool averages = options.reduceOp == c10d::ReduceOp::AVG;
    c10d::AllreduceOptions by;
    by.reduceOp = averages ? c10d::ReduceOp(c10d::ReduceOp::SUM) : options.reduceOp;
    Tensors tensors{tensor};
    return {gloo.allreduce(tensors, by), [averages, tensor, size = gloo.getSize()] {
              if (averages) {
                tensor.div_(size);
              }
            }};
  }

  // Gloo's own ends only within a wait, which nothing cancels.
  template <typename Options>
  static Started reduce_and_scatter(c10d::Backend& gloo, const at::Tensor& written, const at::Tensor& read,
                                    const Options& options) {
    auto all = reduce_all(gloo, read, options);
    return {all.work, [then = all.then, written, read, rank = gloo.getRank()] {
              then();
              written.copy_(read.view({-1, written.numel()})[rank].view_as(written));
            }};
  }

  template <typename Launch>
  WorkPtr each(std::size_t count, Launch one) {
    const bool inside = together_.has_value();
    if (!inside) {
      startCoalescing();
    }
    WorkPtr last;
    for (std::size_t i = 0; i < count; ++i) {
      last = one(i);
    }
    return inside ? last : endCoalescing();
  }

  WorkPtr launch(Operation operation) {
    for (const auto& tensor : flat({operation.written, operation.read})) {
      TORCH_CHECK(is_ours(tensor), "emulatedccl: a tensor on ", tensor.device());
    }
    if (together_) {
      together_->push_back(std::move(operation));
      return nullptr;
    }
    return launch(std::vector{std::move(operation)});
  }

  WorkPtr launch(std::vector<Operation> operations) {
    TORCH_CHECK(!life_->aborted, "emulatedccl: the group was aborted");
    Tensors written, all;
    for (const auto& operation : operations) {
      written.insert(written.end(), operation.written.begin(), operation.written.end());
      const auto both = flat({operation.written, operation.read});
      all.insert(all.end(), both.begin(), both.end());
    }
    TORCH_CHECK(!all.empty(), "emulatedccl: a collective without tensors");
    const auto device = all.front().device();
    check(device.index());
    const auto stream = streams_.try_emplace(device.index(), new_stream(device.index())).first->second;
    const auto given = Event::make();
    Event::record(given, current_stream(device.index()));
    Event::block(given, stream);
    const auto type = operations.size() == 1 ? operations.front().type : c10d::OpType::COALESCED;
    auto kernel = std::make_shared<Kernel>(gloo_, life_, std::move(operations));
    enqueue(stream, [kernel] { as_kernel([&] { kernel->run(); }); });
    count_enqueued();
    ++launched_;
    for (const auto& tensor : all) {
      device_memory().recordStream(tensor.storage().data_ptr(), stream);
    }
    auto work = c10::make_intrusive<Collective>(getRank(), type, stream, written, life_);
    work->enqueued();
    return work;
  }

  BackendPtr gloo_;
  std::shared_ptr<Life> life_ = std::make_shared<Life>();
  std::map<int, c10::Stream> streams_;  // by device
  std::optional<std::vector<Operation>> together_;
  std::uint64_t launched_ = 0;
};

}  // namespace

BackendPtr make_backend(const BackendPtr& gloo) { return c10::make_intrusive<Backend>(gloo); }

}  // namespace emulated
