// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/nccl_backend.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/collective/backend_arguments.h"
#include "lamina/device/failure.h"
#include "lamina/device/rank_device.h"

namespace lamina::collective {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using nccl::Comm;
using nccl::Result;
using nccl::Type;

constexpr auto kFlush = std::chrono::seconds(2);           // for what is enqueued to end before the group does
constexpr auto kLookAtEnd = std::chrono::milliseconds(1);  // how often that is looked at

c10::impl::VirtualGuardImpl guard_of(at::Device device) { return c10::impl::VirtualGuardImpl(device.type()); }

// A collective that is enqueued. Its tensors are kept until a stream waits for it; then memory that is let go of is
// used again behind it.
class NcclWork : public c10d::Work {
 public:
  NcclWork(CollectiveKind kind, const c10::Stream& stream, Tensors written, Tensors all,
           std::shared_ptr<nccl::Communicator> communicator)
      : Work(-1, kind.type),
        stream_(stream),
        done_(stream.device_type()),
        written_(std::move(written)),
        all_(std::move(all)),
        communicator_(std::move(communicator)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                         std::vector{stream.device()})) {
    done_.record(stream);
    const c10::StreamGuard on(stream);  // whose end is the future's, for streams that wait for it
    future_->markCompleted(c10::IValue(written_));
  }
  ~NcclWork() override {
    if (is_waited_for_ || devices::is_failed()) return;
    for (const auto& tensor : all_)
      guard_of(stream_.device()).recordDataPtrOnStream(tensor.storage().data_ptr(), stream_);
  }

  bool isCompleted() override { return done_.query(); }
  bool isSuccess() const override { return true; }
  void abort() override { communicator_->abort(); }
  Tensors result() override { return written_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds) override {
    communicator_->check();
    done_.block(guard_of(stream_.device()).getStream(stream_.device()));
    is_waited_for_ = true;
    return true;
  }

 private:
  const c10::Stream stream_;
  c10::Event done_;
  const Tensors written_, all_;
  const std::shared_ptr<nccl::Communicator> communicator_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::atomic<bool> is_waited_for_ = false;
};

// Elements as NCCL reduces them; none where it cannot.
std::optional<Type> reduced_type(at::ScalarType type) {
  switch (type) {
    case at::kChar:
      return Type::kInt8;
    case at::kByte:
      return Type::kUint8;
    case at::kInt:
      return Type::kInt32;
    case at::kLong:
      return Type::kInt64;
    case at::kHalf:
      return Type::kFloat16;
    case at::kFloat:
      return Type::kFloat32;
    case at::kDouble:
      return Type::kFloat64;
    case at::kBFloat16:
      return Type::kBfloat16;
    default:
      return std::nullopt;
  }
}

std::optional<nccl::Reduction> reduction_by(const c10d::ReduceOp& operation) {
  switch (operation) {
    case c10d::ReduceOp::SUM:
      return nccl::Reduction::kSum;
    case c10d::ReduceOp::AVG:
      return nccl::Reduction::kMean;
    case c10d::ReduceOp::PRODUCT:
      return nccl::Reduction::kProduct;
    case c10d::ReduceOp::MIN:
      return nccl::Reduction::kMin;
    case c10d::ReduceOp::MAX:
      return nccl::Reduction::kMax;
    default:
      return std::nullopt;
  }
}

bool reduces(const Tensors& tensors, const c10d::ReduceOp& operation) {
  return reduction_by(operation) && !tensors.empty() && reduced_type(tensors.front().scalar_type());
}

// Tensors of several lists, one after the other.
Tensors joined(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

void require_size(CollectiveKind kind, const at::Tensor& tensor, std::int64_t elements, const at::Tensor& beside) {
  if (tensor.numel() == elements && tensor.scalar_type() == beside.scalar_type()) return;
  throw base::UsageError(base::str(kind.name, ": a tensor of ", tensor.numel(), " ", tensor.scalar_type(),
                                   " in place of ", elements, " ", beside.scalar_type()));
}

const Tensors& only_list(CollectiveKind kind, const std::vector<Tensors>& lists) {
  require_as_many(kind, lists.size(), 1);
  return lists.front();
}

class NcclBackend : public c10d::Backend {
 public:
  NcclBackend(std::shared_ptr<nccl::Communicator> communicator, const nccl::Library& library,
              c10::intrusive_ptr<c10d::Backend> staged)
      : Backend(staged->getRank(), staged->getSize()),
        communicator_(std::move(communicator)),
        library_(library),
        staged_(std::move(staged)),
        device_(devices::rank_device()),
        stream_(guard_of(device_).getStreamFromGlobalPool(device_)) {}
  ~NcclBackend() override { end(); }

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return staged_->getBackendOptions(); }
  std::uint64_t getSequenceNumberForGroup() override { return started_; }
  void setSequenceNumberForGroup() override {}

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    require_as_many(kBroadcast, tensors.size(), 1);
    const int root = require_member(kBroadcast, options.rootRank, size_);
    return enqueue(kBroadcast, tensors, {}, [&](Comm* comm) {
      const auto& one = tensors.front();
      return library_.broadcast(one.const_data_ptr(), one.mutable_data_ptr(), one.nbytes(), Type::kUint8, root, comm,
                                handle());
    });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    require_as_many(kAllReduce, tensors.size(), 1);
    if (!reduces(tensors, options.reduceOp)) return staged_->allreduce(tensors, options);
    return reduce_all(kAllReduce, tensors, options);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    if (!reduces(tensors, options.reduceOp)) return staged_->allreduce_coalesced(tensors, options);
    return reduce_all(kAllReduceCoalesced, tensors, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    require_as_many(kReduce, tensors.size(), 1);
    const int root = require_member(kReduce, options.rootRank, size_);
    if (!reduces(tensors, options.reduceOp)) return staged_->reduce(tensors, options);
    return enqueue(kReduce, tensors, {}, [&](Comm* comm) {
      return reduce_to(tensors.front(), tensors.front(), options.reduceOp, root, comm);
    });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    require_as_many(kAllGather, inputs.size(), 1);
    const auto& parts = only_list(kAllGather, outputs);
    require_as_many(kAllGather, parts.size(), static_cast<std::size_t>(size_));
    const auto& mine = inputs.front();
    for (const auto& part : parts) require_size(kAllGather, part, mine.numel(), mine);
    return enqueue_together(kAllGather, parts, inputs, [&](Comm* comm, int member) {
      return library_.broadcast(mine.const_data_ptr(), parts[member].mutable_data_ptr(), mine.nbytes(), Type::kUint8,
                                member, comm, handle());
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    return gather_all(kAllGatherTensor, {output}, {input});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return gather_all(kAllGatherCoalesced, outputs, inputs);
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    if (!reduces(outputs, options.reduceOp)) return staged_->reduce_scatter(outputs, inputs, options);
    require_as_many(kReduceScatter, outputs.size(), 1);
    const auto& parts = only_list(kReduceScatter, inputs);
    require_as_many(kReduceScatter, parts.size(), static_cast<std::size_t>(size_));
    const auto& mine = outputs.front();
    for (const auto& part : parts) require_size(kReduceScatter, part, mine.numel(), mine);
    return enqueue_together(kReduceScatter, outputs, parts, [&](Comm* comm, int member) {
      return reduce_to(parts[member], mine, options.reduceOp, member, comm);
    });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    if (!reduces({output}, options.reduceOp)) return staged_->_reduce_scatter_base(output, input, options);
    return scatter_sums(kReduceScatterTensor, {output}, {input}, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    if (!reduces(outputs, options.reduceOp)) return staged_->reduce_scatter_tensor_coalesced(outputs, inputs, options);
    return scatter_sums(kReduceScatterCoalesced, outputs, inputs, options);
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    require_as_many(kGather, inputs.size(), 1);
    const int root = require_member(kGather, options.rootRank, size_);
    Tensors sent(static_cast<std::size_t>(size_)), received(static_cast<std::size_t>(size_));
    sent[root] = inputs.front();
    if (rank_ == root) received = all_parts(kGather, outputs, inputs.front());
    return exchange(kGather, received, sent);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    require_as_many(kScatter, outputs.size(), 1);
    const int root = require_member(kScatter, options.rootRank, size_);
    Tensors sent(static_cast<std::size_t>(size_)), received(static_cast<std::size_t>(size_));
    received[root] = outputs.front();
    if (rank_ == root) sent = all_parts(kScatter, inputs, outputs.front());
    return exchange(kScatter, received, sent);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    require_as_many(kAllToAll, outputs.size(), static_cast<std::size_t>(size_));
    require_as_many(kAllToAll, inputs.size(), static_cast<std::size_t>(size_));
    return exchange(kAllToAll, outputs, inputs);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_rows,
                        std::vector<std::int64_t>& input_rows, const c10d::AllToAllOptions&) override {
    return exchange(kAllToAllTensor, by_rows(output, output_rows), by_rows(input, input_rows));
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override { return staged_->barrier(options); }
  WorkPtr send(Tensors& tensors, int to, int tag) override { return staged_->send(tensors, to, tag); }
  WorkPtr recv(Tensors& tensors, int from, int tag) override { return staged_->recv(tensors, from, tag); }

  void abort() override {
    is_aborted_ = true;
    communicator_->abort();
    staged_->abort();
  }
  void shutdown() override {
    end();
    staged_->shutdown();
  }

 private:
  void* handle() const { return stream_.native_handle(); }

  WorkPtr enqueue(CollectiveKind kind, const Tensors& written, const Tensors& read,
                  const std::function<Result(Comm* comm)>& call) {
    auto all = joined({written, read});
    for (const auto& tensor : all) {
      const bool fits = tensor.defined() && tensor.device() == device_ && tensor.layout() == at::kStrided &&
                        tensor.is_contiguous() && has_memory(tensor);
      if (!fits) throw base::UsageError(base::str(kind.name, " takes contiguous tensors of ", device_));
    }
    const std::lock_guard lock(mutex_);  // members enqueue in one order
    const c10::DeviceGuard on_device(device_);
    c10::Event given(device_.type());
    given.record(guard_of(device_).getStream(device_));
    given.block(stream_);
    communicator_->run(kind.name, call);
    ++started_;
    return c10::make_intrusive<NcclWork>(kind, stream_, written, std::move(all), communicator_);
  }

  // Operations that NCCL takes together, one for each `index` below `count`.
  template <class Each>
  WorkPtr enqueue_together(CollectiveKind kind, const Tensors& written, const Tensors& read, int count, Each each) {
    return enqueue(kind, written, read, [&](Comm* comm) {
      auto result = library_.group_start();
      for (int index = 0; index < count && took(result); ++index) result = each(comm, index);
      const auto ended = library_.group_end();
      return took(result) ? ended : result;
    });
  }
  template <class Each>
  WorkPtr enqueue_together(CollectiveKind kind, const Tensors& written, const Tensors& read, Each each) {
    return enqueue_together(kind, written, read, size_, each);
  }
  static bool took(Result result) { return result == Result::kSuccess || result == Result::kInProgress; }

  template <class Options>
  WorkPtr reduce_all(CollectiveKind kind, const Tensors& tensors, const Options& options) {
    return enqueue_together(kind, tensors, {}, static_cast<int>(tensors.size()), [&](Comm* comm, int index) {
      const auto& one = tensors[index];
      return library_.all_reduce(one.const_data_ptr(), one.mutable_data_ptr(), count(one), type_of(one),
                                 *reduction_by(options.reduceOp), comm, handle());
    });
  }

  Result reduce_to(const at::Tensor& from, const at::Tensor& to, const c10d::ReduceOp& operation, int root,
                   Comm* comm) const {
    return library_.reduce(from.const_data_ptr(), to.mutable_data_ptr(), count(from), type_of(from),
                           *reduction_by(operation), root, comm, handle());
  }

  WorkPtr gather_all(CollectiveKind kind, const Tensors& outputs, const Tensors& inputs) {
    require_as_many(kind, outputs.size(), inputs.size());
    for (std::size_t i = 0; i < inputs.size(); ++i)
      require_size(kind, outputs[i], inputs[i].numel() * size_, inputs[i]);
    return enqueue_together(kind, outputs, inputs, static_cast<int>(inputs.size()), [&](Comm* comm, int index) {
      return library_.all_gather(inputs[index].const_data_ptr(), outputs[index].mutable_data_ptr(),
                                 inputs[index].nbytes(), Type::kUint8, comm, handle());
    });
  }

  WorkPtr scatter_sums(CollectiveKind kind, const Tensors& outputs, const Tensors& inputs,
                       const c10d::ReduceScatterOptions& options) {
    require_as_many(kind, inputs.size(), outputs.size());
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      require_size(kind, inputs[i], outputs[i].numel() * size_, outputs[i]);
    }
    return enqueue_together(kind, outputs, inputs, static_cast<int>(outputs.size()), [&](Comm* comm, int index) {
      const auto& mine = outputs[index];
      return library_.reduce_scatter(inputs[index].const_data_ptr(), mine.mutable_data_ptr(), count(mine),
                                     type_of(mine), *reduction_by(options.reduceOp), comm, handle());
    });
  }

  // Gives each member what is `sent` to it, and takes what it gives; an undefined tensor is nothing.
  WorkPtr exchange(CollectiveKind kind, const Tensors& received, const Tensors& sent) {
    const auto defined = [](const Tensors& some) {
      Tensors left;
      for (const auto& each : some) {
        if (each.defined()) left.push_back(each);
      }
      return left;
    };
    return enqueue_together(kind, defined(received), defined(sent), [&](Comm* comm, int member) {
      auto result = Result::kSuccess;
      if (const auto& to = sent[member]; to.defined() && to.numel() > 0) {
        result = library_.send(to.const_data_ptr(), to.nbytes(), Type::kUint8, member, comm, handle());
      }
      if (const auto& from = received[member]; took(result) && from.defined() && from.numel() > 0) {
        result = library_.recv(from.mutable_data_ptr(), from.nbytes(), Type::kUint8, member, comm, handle());
      }
      return result;
    });
  }

  Tensors all_parts(CollectiveKind kind, const std::vector<Tensors>& lists, const at::Tensor& mine) const {
    const auto& parts = only_list(kind, lists);
    require_as_many(kind, parts.size(), static_cast<std::size_t>(size_));
    for (const auto& part : parts) require_size(kind, part, mine.numel(), mine);
    return parts;
  }

  // The rows of each member; equally many where `rows` is empty.
  Tensors by_rows(const at::Tensor& tensor, const std::vector<std::int64_t>& rows) const {
    const auto all = tensor.dim() == 0 ? 0 : tensor.size(0);
    std::int64_t sum = 0;
    for (const auto each : rows) sum += each;
    if (rows.empty() ? all % size_ != 0 : std::cmp_not_equal(rows.size(), size_) || sum != all) {
      throw base::UsageError(
          base::str(kAllToAllTensor.name, ": ", all, " rows cannot be parted over ", size_, " members"));
    }
    Tensors parts;
    std::int64_t at = 0;
    for (int member = 0; member < size_; ++member) {
      const auto some = rows.empty() ? all / size_ : rows[member];
      parts.push_back(tensor.narrow(0, at, some));
      at += some;
    }
    return parts;
  }

  static std::size_t count(const at::Tensor& tensor) { return static_cast<std::size_t>(tensor.numel()); }
  static Type type_of(const at::Tensor& tensor) { return *reduced_type(tensor.scalar_type()); }

  // Lets what is enqueued end first.
  void end() {
    try {
      const auto late = base::Deadline::after(kFlush);
      while (!is_aborted_ && !devices::is_failed() && !stream_.query() && !late.expired()) {
        communicator_->check();
        std::this_thread::sleep_for(kLookAtEnd);
      }
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): it has failed, and is aborted
    }
    communicator_->abort();
  }

  const std::shared_ptr<nccl::Communicator> communicator_;
  const nccl::Library& library_;
  const c10::intrusive_ptr<c10d::Backend> staged_;
  const at::Device device_;
  const c10::Stream stream_;
  std::mutex mutex_;
  std::atomic<std::uint64_t> started_ = 0;
  std::atomic<bool> is_aborted_ = false;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(std::shared_ptr<nccl::Communicator> communicator,
                                                    const nccl::Library& library,
                                                    c10::intrusive_ptr<c10d::Backend> staged) {
  return c10::make_intrusive<NcclBackend>(std::move(communicator), library, std::move(staged));
}

}  // namespace lamina::collective
