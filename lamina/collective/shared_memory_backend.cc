// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/shared_memory_backend.h"

#include <ATen/ops/empty_like.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/collective/backend_arguments.h"
#include "lamina/collective/flat.h"
#include "lamina/collective/joint_work.h"
#include "lamina/collective/sparse.h"
#include "lamina/device/capabilities.h"
#include "lamina/value/dtype.h"

namespace lamina::collective {
namespace {

using shared_memory::Check;
using shared_memory::Communicator;

// A wait for whoever sends looks so often before it sleeps between looks.
constexpr int kLooks = 100;
constexpr auto kPause = std::chrono::microseconds(200);

class SharedMemoryBackend : public c10d::Backend, public Leavable, public Purposeful, public MemorySharing {
 public:
  SharedMemoryBackend(shared_memory::Neighbours neighbours, std::chrono::milliseconds timeout,
                      std::function<void()> check_interrupt)
      : Backend(neighbours.rank(), neighbours.size()),
        timeout_(timeout),
        check_interrupt_(std::move(check_interrupt)),
        group_(std::make_unique<Communicator>(std::move(neighbours), base::Deadline::after(timeout))),
        together_(std::make_shared<Lane>()),
        to_(lanes(size_)),
        from_(lanes(size_)),
        from_any_(std::make_shared<Lane>()) {}

  ~SharedMemoryBackend() override {
    abort();
    each_lane([](Lane& lane) { lane.close(); });
  }

  const std::string getBackendName() const override { return "lamina"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(getBackendName(), timeout_.load());
  }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }

  std::vector<shared_memory::Segment> share(std::size_t bytes, base::Deadline deadline) override {
    return group().share(bytes, deadline);
  }

  void set_purpose(std::string purpose) override { purpose_ = std::move(purpose); }

  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return true; }

  // Any thread may call it, and alone. An ordinary tensor where the arena has no room.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    if (!devices::is_host(options.device())) {
      throw base::UsageError(base::str("lamina allocates tensors of the CPU, not on ", options.device().str()));
    }
    TORCH_CHECK_VALUE(size >= 0, "a tensor of ", size, " elements");
    const auto bytes = static_cast<std::size_t>(size) * options.dtype().itemsize();
    auto memory = group().allocate(bytes);
    if (!memory) return at::empty({size}, options);
    auto* data = memory.get();
    auto* owner = new std::shared_ptr<std::byte>(std::move(memory));
    const auto release = [](void* owner) { delete static_cast<std::shared_ptr<std::byte>*>(owner); };
    // A storage that is resized gets ordinary memory.
    const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, {data, owner, release, devices::kHost},
                               at::getCPUAllocator(), /*resizable=*/true);
    return at::empty({0}, options).set_(storage, 0, {size});
  }

  // Sums.

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (tensors.size() == 1 && tensors.front().defined() && tensors.front().is_sparse()) {
      return all_reduce_sparse(tensors.front(), options);
    }
    only(kAllReduce, tensors);
    return all_reduce_each(kAllReduce, tensors, options);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return all_reduce_each(kAllReduceCoalesced, tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const auto how = reduction_for(kReduce, only(kReduce, tensors), options.reduceOp);
    const int root = require_member(kReduce, options.rootRank, size_);
    return start(kReduce, tensors, options, [this, tensor = tensors.front(), how, root](const Check& check) {
      const Flat flat(tensor);
      group().reduce(flat.buffer(), how, root, check);
      if (root == rank_) flat.put_back();
    });
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    const auto mine = only(kReduceScatter, outputs);
    const auto all = list_of(kReduceScatter, inputs, mine, size_);
    const auto how = reduction_for(kReduceScatter, mine, options.reduceOp);
    return start(kReduceScatter, outputs, options, [this, mine, all, how](const Check& check) {
      const Flat flat(mine);
      group().reduce_scatter(flat.buffer(), Flats(all).buffers(), how, check);
      flat.put_back();
    });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& mine, at::Tensor& all, const c10d::ReduceScatterOptions& options) override {
    return reduce_scatter_each(kReduceScatterTensor, {mine}, {all}, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return reduce_scatter_each(kReduceScatterCoalesced, outputs, inputs, options);
  }

  // Copies.

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const int root = require_member(kBroadcast, options.rootRank, size_);
    return start(kBroadcast, tensors, options, [this, tensor = only(kBroadcast, tensors), root](const Check& check) {
      const Flat flat(tensor);
      group().broadcast(flat.buffer(), root, check);
      if (root != rank_) flat.put_back();
    });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    const auto mine = only(kAllGather, inputs);
    const auto all = list_of(kAllGather, outputs, mine, size_);
    return start(kAllGather, all, options,
                 [this, mine, all](const Check& check) { gather_lists({all}, {mine}, check); });
  }

  // A list per member, of a tensor for each input.
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> lists(inputs.size());
    for (const auto& of_member : outputs) {
      require_as_many(kAllGatherCoalesced, of_member.size(), inputs.size());
      for (std::size_t i = 0; i < inputs.size(); ++i) lists[i].push_back(of_member[i]);
    }
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      require_dense(kAllGatherCoalesced, inputs[i]);
      require_list(kAllGatherCoalesced, lists[i], inputs[i], size_);
    }
    return start(kAllGatherCoalesced, inputs, options,
                 [this, inputs, lists](const Check& check) { gather_lists(lists, inputs, check); });
  }

  WorkPtr _allgather_base(at::Tensor& all, at::Tensor& mine, const c10d::AllgatherOptions& options) override {
    return all_gather_each(kAllGatherTensor, {all}, {mine}, options);
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return all_gather_each(kAllGatherCoalesced, outputs, inputs, options);
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const auto mine = only(kGather, inputs);
    const int root = require_member(kGather, options.rootRank, size_);
    const auto all = root == rank_ ? list_of(kGather, outputs, mine, size_) : Tensors();
    return start(kGather, all, options, [this, mine, all, root](const Check& check) {
      const Flats flats(all);
      group().gather(flats.buffers(), Flat(mine).buffer(), root, check);
      flats.put_back();
    });
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    const auto mine = only(kScatter, outputs);
    const int root = require_member(kScatter, options.rootRank, size_);
    const auto all = root == rank_ ? list_of(kScatter, inputs, mine, size_) : Tensors();
    return start(kScatter, outputs, options, [this, mine, all, root](const Check& check) {
      const Flat flat(mine);
      group().scatter(flat.buffer(), Flats(all).buffers(), root, check);
      flat.put_back();
    });
  }

  WorkPtr alltoall(Tensors& received, Tensors& sent, const c10d::AllToAllOptions& options) override {
    for (const auto* parts : {&received, &sent}) {
      require_as_many(kAllToAll, parts->size(), size_);
      for (const auto& part : *parts) {
        require_dense(kAllToAll, part);
        require_alike(kAllToAll, part, sent.front());
      }
    }
    return start(kAllToAll, received, options, [this, received, sent](const Check& check) {
      const Flats to(received);
      group().all_to_all(to.buffers(), Flats(sent).buffers(), check);
      to.put_back();
    });
  }

  WorkPtr alltoall_base(at::Tensor& received, at::Tensor& sent, std::vector<std::int64_t>& received_rows,
                        std::vector<std::int64_t>& sent_rows, const c10d::AllToAllOptions& options) override {
    const auto takes = counts_of(received, received_rows, size_), gives = counts_of(sent, sent_rows, size_);
    require_alike(kAllToAllTensor, received, sent);
    return start(kAllToAllTensor, {received}, options, [this, received, sent, takes, gives](const Check& check) {
      const Flat to(received), from(sent);
      group().all_to_all(shared_memory::parts_of(to.buffer(), takes), shared_memory::parts_of(from.buffer(), gives),
                         check);
      to.put_back();
    });
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return start(kBarrier, {}, options, [this](const Check& check) { group().barrier(check); });
  }

  // From one member to another.

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    require_other(kSend, to);
    const auto run = [this, tensor = only(kSend, tensors), to, tag](const Check& check) {
      group().send(Flat(tensor).buffer(), to, tag, check);
    };
    return start_on(*to_[to], group().to(to), kSend, tensors, timeout_, /*here=*/false, run);
  }

  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    require_other(kReceive, from);
    const auto tensor = only(kReceive, tensors);
    // Behind a receipt from whoever sends, which may be this member.
    if (!from_any_->idle()) {
      const auto run = [this, tensor, from, tag](const Check& check) { receive_now(tensor, from, tag, check); };
      return queue(*from_any_, work_for(kReceive, tensors, timeout_, /*synchronous=*/false, run), /*here=*/false);
    }
    return start_on(*from_[from], group().from(from), kReceive, tensors, timeout_, /*here=*/false,
                    receipt(tensor, from, tag));
  }

  // The first that another member sends, but for those of which receipts wait already.
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    const auto source = std::make_shared<std::atomic<LaneWork*>>(nullptr);
    const auto run = [this, tensor = only(kReceive, tensors), tag, source](const Check& check) {
      const int from = first_to_send(check);
      source->load()->set_source(from);
      receive_now(tensor, from, tag, check);
    };
    auto work = work_for(kReceive, tensors, timeout_, /*synchronous=*/false, run);
    *source = work.get();
    return queue(*from_any_, std::move(work), /*here=*/false);
  }

  // Operations that are one work together.

  bool supportsCoalescing() const override { return true; }

  void startCoalescing() override {
    const std::lock_guard guard(coalescing_);
    coalesced_.emplace();
  }

  WorkPtr endCoalescing() override {
    const std::lock_guard guard(coalescing_);
    auto works = std::exchange(coalesced_, std::nullopt).value_or(std::vector<WorkPtr>());
    return c10::make_intrusive<JointWork>(std::move(works));
  }

  std::uint64_t getSequenceNumberForGroup() override { return started_; }
  void setSequenceNumberForGroup() override {}

  void abort() override {
    each_lane([](Lane& lane) { lane.abort(); });
  }

  // As torch's own backends do, it ends what others may still need this member for; each operation has its time-out. A
  // receipt that nobody has waited for is for nobody. Then threads, sockets and memory go, whoever still holds this.
  void shutdown() override {
    try {
      together_->drain(check_interrupt_);
      for (const auto& lane : to_) lane->drain(check_interrupt_);
    } catch (...) {
      abort();
      throw;
    }
    each_lane([](Lane& lane) { lane.close(); });
    if (!Lane::runs_here()) group_.reset();  // an operation that ends here still has it
  }

  std::uint64_t begun() override {
    together_->drain();
    return group().together().begun();
  }
  std::uint64_t abandon() override {
    together_->abort();
    return begun();
  }
  void resume_at(std::uint64_t number) override {
    together_->drain();
    group().together().skip_to(number);
  }

 private:
  void require_other(CollectiveKind kind, int index) const {
    if (require_member(kind, index, size_) == rank_)
      throw base::UsageError(base::str(kind.name, ": to this rank itself"));
  }

  template <class Options, class Run>
  WorkPtr start(CollectiveKind kind, Tensors results, const Options& options, Run run) {
    ++started_;
    const auto timeout = options.timeout == c10d::kUnsetTimeout ? timeout_.load() : options.timeout;
    return start_on(*together_, group().together(), kind, std::move(results), timeout, /*here=*/!options.asyncOp,
                    std::move(run));
  }

  Communicator& group() const {
    if (!group_) throw base::UsageError("a collective of a group that was destroyed", base::Code{"group-destroyed"});
    return *group_;
  }

  static std::vector<std::shared_ptr<Lane>> lanes(int count) {
    std::vector<std::shared_ptr<Lane>> lanes(count);
    for (auto& lane : lanes) lane = std::make_shared<Lane>();
    return lanes;
  }

  template <class Call>
  void each_lane(const Call& call) {
    call(*together_);
    call(*from_any_);  // which runs what is in the others
    for (const auto* lanes : {&to_, &from_}) {
      for (const auto& lane : *lanes) call(*lane);
    }
  }

  // Each work counts as one operation of `exchange` on all members. Where it fails before that operation has begun,
  // this member gives the operation up, so that its later ones still meet those of the others.
  template <class Run>
  WorkPtr start_on(Lane& lane, shared_memory::Exchange& exchange, CollectiveKind kind, Tensors results,
                   std::chrono::milliseconds timeout, bool here, Run run) {
    auto purpose = &lane == together_.get() ? std::exchange(purpose_, {}) : std::string();
    const auto once = [&exchange, kind, run = std::move(run), purpose = std::move(purpose)](const Check& check) {
      const auto number = exchange.begun();
      exchange.set_purpose(purpose);
      try {
        check({});  // it may be over before it begins
        run(check);
      } catch (const std::exception& error) {
        if (exchange.begun() == number) exchange.leave_out(kind.name, error.what());
        throw;
      }
    };
    return queue(lane, work_for(kind, std::move(results), timeout, /*synchronous=*/here, once), here);
  }

  LaneWorkPtr work_for(CollectiveKind kind, Tensors results, std::chrono::milliseconds timeout, bool synchronous,
                       std::function<void(const Check& check)> run) const {
    return c10::make_intrusive<LaneWork>(LaneOperation{kind.type, kind.name, std::move(results), timeout, synchronous,
                                                       check_interrupt_, std::move(run)});
  }

  // For torch's profiler a work ends with this call: the profiler may end before the work, and takes with it what an
  // end in another thread would write to.
  WorkPtr queue(Lane& lane, LaneWorkPtr work, bool here) {
    at::RecordFunction record(at::RecordScope::USER_SCOPE);
    const auto results = record.isActive() ? work->result() : Tensors();
    const std::vector<c10::IValue> recorded(results.begin(), results.end());
    if (record.isActive()) record.before(work->name(), &recorded);
    {
      const std::lock_guard guard(coalescing_);
      if (coalesced_) {
        here = false;
        std::erase_if(*coalesced_, [](const WorkPtr& one) { return one->isCompleted() && one->isSuccess(); });
        coalesced_->push_back(work);
      }
    }
    lane.run(work, here);
    return work;
  }

  std::function<void(const Check& check)> receipt(const at::Tensor& tensor, int from, int tag) {
    return [this, tensor, from, tag](const Check& check) {
      const Flat flat(tensor);
      group().receive(flat.buffer(), from, tag, check);
      flat.put_back();
    };
  }

  // In the thread of `from_any_`: a receipt in its turn.
  void receive_now(const at::Tensor& tensor, int from, int tag, const Check& check) {
    const auto run = receipt(tensor, from, tag);
    start_on(*from_[from], group().from(from), kReceive, {}, timeout_, /*here=*/true, [&](const Check& /*own*/) {
      run(check);
    })->wait();
  }

  int first_to_send(const Check& check) {
    for (int look = 0;; ++look) {
      bool all_lost = true;
      for (int member = 0; member < size_; ++member) {
        if (member == rank_) continue;
        const bool lost = group().lost(member);
        if (from_[member]->idle() && group().offers(member)) return member;
        all_lost = all_lost && lost;
      }
      if (all_lost) throw base::PeerError("all other members have closed the group, or their processes have ended");
      check("one of the others");
      if (look < kLooks) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(kPause);
      }
    }
  }

  WorkPtr all_reduce_each(CollectiveKind kind, const Tensors& tensors, const c10d::AllreduceOptions& options) {
    for (const auto& tensor : tensors) {
      require_dense(kind, tensor);
      reduction_for(kind, tensor, options.reduceOp);
    }
    return start(kind, tensors, options,
                 [this, tensors, how = reduction_of(kind, options.reduceOp)](const Check& check) {
                   const Flats flats(tensors);
                   group().all_reduce(flats.buffers(), how, check);
                   flats.put_back();
                 });
  }

  WorkPtr all_reduce_sparse(const at::Tensor& tensor, const c10d::AllreduceOptions& options) {
    if (!devices::is_host(tensor) || !value::dtype_of(tensor.scalar_type())) {
      throw base::UsageError(base::str(kAllReduce.name, " takes sparse tensors of the CPU, not one of ",
                                       tensor.scalar_type(), " on ", tensor.device().str()));
    }
    if (const auto how = reduction_of(kAllReduce, options.reduceOp); how != shared_memory::Reduction::kSum) {
      throw base::UsageError(base::str(kAllReduce.name, " of sparse tensors has SUM, not this reduction"));
    }
    return start(kAllReduce, {tensor}, options, [this, tensor](const Check& check) {
      tensor.copy_(sum_of_sparse(tensor, [&](const at::Tensor& mine) {
        Tensors all;
        for (int i = 0; i < size_; ++i) all.push_back(at::empty_like(mine));
        gather_lists({all}, {mine}, check);
        return all;
      }));
    });
  }

  WorkPtr reduce_scatter_each(CollectiveKind kind, const Tensors& outputs, const Tensors& inputs,
                              const c10d::ReduceScatterOptions& options) {
    require_parts(kind, inputs, outputs, size_);
    for (const auto& mine : outputs) reduction_for(kind, mine, options.reduceOp);
    const auto how = reduction_of(kind, options.reduceOp);
    return start(kind, outputs, options, [this, outputs, inputs, how](const Check& check) {
      const Flats mine(outputs), all(inputs);
      group().reduce_scatter(divided(mine, all), how, check);
      mine.put_back();
    });
  }

  WorkPtr all_gather_each(CollectiveKind kind, const Tensors& outputs, const Tensors& inputs,
                          const c10d::AllgatherOptions& options) {
    require_parts(kind, outputs, inputs, size_);
    return start(kind, outputs, options, [this, outputs, inputs](const Check& check) {
      const Flats mine(inputs), all(outputs);
      group().all_gather(divided(mine, all), check);
      all.put_back();
    });
  }

  // `all`: of each tensor the parts of all members, one after the other.
  std::vector<shared_memory::Divided> divided(const Flats& mine, const Flats& all) const {
    std::vector<shared_memory::Divided> divided;
    for (std::size_t i = 0; i < mine.buffers().size(); ++i) {
      divided.push_back({mine.buffers()[i], shared_memory::equal_parts(all.buffers()[i], size_)});
    }
    return divided;
  }

  // `lists`: for each tensor one of each member.
  void gather_lists(const std::vector<Tensors>& lists, const Tensors& mine, const Check& check) {
    const Flats from(mine);
    const std::vector<Flats> to(lists.begin(), lists.end());
    std::vector<shared_memory::Divided> divided;
    for (std::size_t i = 0; i < mine.size(); ++i) divided.push_back({from.buffers()[i], to[i].buffers()});
    group().all_gather(divided, check);
    for (const auto& flats : to) flats.put_back();
  }

  std::atomic<std::chrono::milliseconds> timeout_;
  const std::function<void()> check_interrupt_;
  std::unique_ptr<Communicator> group_;                 // none after shutdown()
  const std::shared_ptr<Lane> together_;                // of the collectives
  const std::vector<std::shared_ptr<Lane>> to_, from_;  // by member
  const std::shared_ptr<Lane> from_any_;
  std::string purpose_;  // of the next collective
  std::atomic<std::uint64_t> started_ = 0;
  std::mutex coalescing_;
  std::optional<std::vector<WorkPtr>> coalesced_;  // under it: works that have not ended well
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_shared_memory_backend(shared_memory::Neighbours neighbours,
                                                             std::chrono::milliseconds timeout,
                                                             std::function<void()> check_interrupt) {
  return c10::make_intrusive<SharedMemoryBackend>(std::move(neighbours), timeout, std::move(check_interrupt));
}

}  // namespace lamina::collective
