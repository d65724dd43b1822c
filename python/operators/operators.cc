// SPDX-License-Identifier: Apache-2.0
// The operators by which TensorFlow's graphs meet those of other ranks. No header of torch's is included here: both
// libraries define CHECK.
//
// Kernels run in TensorFlow's pools, and wait in none of their threads: SMPInput hands its end to the step, which calls
// it from any thread, and that hands it on to the pool.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/base/hash.h"
#include "lamina/graph/current.h"
#include "lamina/graph/step.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/env.h"

namespace lamina::operators {
namespace {

namespace tf = tensorflow;

absl::Status status_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const base::UsageError& thrown) {
    return absl::FailedPreconditionError(thrown.what());
  } catch (const base::TimeoutError& thrown) {
    return absl::DeadlineExceededError(thrown.what());
  } catch (const base::PeerError& thrown) {
    return absl::UnknownError(thrown.what());  // TensorFlow takes UnavailableError for one of its network
  } catch (const std::exception& thrown) {
    return absl::AbortedError(thrown.what());
  }
}

template <class Act>
absl::Status status_from(const Act& act) {
  try {
    act();
  } catch (...) {
    return status_of(std::current_exception());
  }
  return absl::OkStatus();
}

graph::TensorBytes value_of(const tf::Tensor& tensor) {
  graph::TensorBytes value;
  value.type = tensor.dtype();
  for (const auto size : tensor.shape().dim_sizes()) value.shape.push_back(size);
  const auto kept = std::make_shared<const tf::Tensor>(tensor);
  value.data = {kept, kept->data()};
  value.size_bytes = tensor.TotalBytes();
  return value;
}

// Copies `value` to that output.
absl::Status put(tf::OpKernelContext* context, int output, const graph::TensorBytes& value) {
  if (value.type != context->expected_output_dtype(output)) {
    return absl::InternalError("a value of another type than the graph has came from another rank");
  }
  tf::Tensor* made = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output(output, tf::TensorShape(value.shape), &made));
  if (made->TotalBytes() != value.size_bytes) return absl::InternalError("a value of another size came");
  std::memcpy(made->data(), value.data.get(), value.size_bytes);
  return absl::OkStatus();
}

// The attributes of SMPInput and SMPOutput.
struct Place {
  explicit Place(tf::OpKernelConstruction* construction) {
    std::int64_t at = 0;
    OP_REQUIRES_OK(construction, construction->GetAttr("segment", &at));
    replica.segment = static_cast<int>(at);
    OP_REQUIRES_OK(construction, construction->GetAttr("microbatch", &at));
    replica.microbatch = base::Microbatch(at);
    bool holds = false;
    OP_REQUIRES_OK(construction, construction->GetAttr("backward", &holds));
    replica.pass = holds ? graph::Direction::kBackward : graph::Direction::kForward;
    OP_REQUIRES_OK(construction, construction->GetAttr("copies", &holds));
    among = holds ? graph::Among::kCopies : graph::Among::kOneCopy;
  }
  graph::Replica replica;
  graph::Among among = graph::Among::kOneCopy;
};

// [Note: the first error] An operation that fails within a segment cancels the step before TensorFlow has its error:
// the segment is a function, which is to end first. Of the errors of a graph TensorFlow raises the first. So what waits
// in a step that has failed here ends a second later.
constexpr std::int64_t kLaterMicroseconds = 1'000'000;
std::atomic<bool> failed_here = false;  // the step, until the next one begins

// Begins a segment: waits for its turn and for the values of other ranks, and gives these.
class Input : public tf::AsyncOpKernel {
 public:
  explicit Input(tf::OpKernelConstruction* construction) : AsyncOpKernel(construction), place_(construction) {}

  void ComputeAsync(tf::OpKernelContext* context, DoneCallback done) override {
    const auto status = status_from([&] {
      const auto step = graph::current(place_.among)->step();
      const auto run = *context->runner();
      const auto go = [this, context, done, run, step](std::vector<graph::TensorBytes> values) {
        run([this, context, done, values = std::move(values)] {
          give(context, values);
          done();
        });
      };
      const auto fail = [context, done, run](const std::exception_ptr& error) {
        const auto end = [context, done, error] {
          context->SetStatus(status_of(error));
          done();
        };
        if (!failed_here) return run(end);
        tf::Env::Default()->SchedClosureAfter(kLaterMicroseconds, [run, end] { run(end); });
      };
      step->enter(place_.replica, {go, fail});
    });
    OP_REQUIRES_OK_ASYNC(context, status, done);
  }

 private:
  static void give(tf::OpKernelContext* context, const std::vector<graph::TensorBytes>& values) {
    context->set_output(0, context->input(0));
    for (std::size_t i = 0; i < values.size(); ++i) {
      OP_REQUIRES_OK(context, put(context, static_cast<int>(i) + 1, values[i]));
    }
    const int passed = static_cast<int>(values.size());  // those behind them go through
    for (int i = 1; i < context->num_inputs(); ++i) context->set_output(passed + i, context->input(i));
  }

  const Place place_;
};

// Ends a segment: sends its values, and gives the turn up.
class Output : public tf::OpKernel {
 public:
  explicit Output(tf::OpKernelConstruction* construction) : OpKernel(construction), place_(construction) {
    tf::DataTypeVector sent;
    OP_REQUIRES_OK(construction, construction->GetAttr("Tsent", &sent));
    sent_ = static_cast<int>(sent.size());
  }

  void Compute(tf::OpKernelContext* context) override {
    std::vector<graph::TensorBytes> values;
    for (int i = 1; i <= sent_; ++i) values.push_back(value_of(context->input(i)));
    const auto status = status_from([&] {
      const auto step = graph::current(place_.among)->step();
      if (!failed_here) step->leave(place_.replica, values);
    });
    OP_REQUIRES_OK(context, status);
    context->set_output(0, context->input(0));
    for (int i = sent_ + 1; i < context->num_inputs(); ++i) context->set_output(i - sent_, context->input(i));
  }

 private:
  const Place place_;
  int sent_ = 0;
};

std::uint64_t checksum(const tf::Tensor& tensor) {
  std::uint64_t sum = base::hash64(static_cast<std::int64_t>(tensor.dtype()), 0);
  for (const std::int64_t size : tensor.shape().dim_sizes()) sum = base::hash64(size, sum);
  if (tensor.dtype() != tf::DT_STRING)
    return base::hash64({static_cast<const char*>(tensor.data()), tensor.TotalBytes()}, sum);
  const auto words = tensor.flat<tf::tstring>();
  for (std::int64_t i = 0; i < words.size(); ++i) sum = base::hash64({words(i).data(), words(i).size()}, sum);
  return sum;
}

constexpr std::int64_t kNone = -1;  // the number of no graph

// Enters a step: of a graph over the ranks of one copy, of one over copies, or of both together. An operation that
// fails in it cancels all of TensorFlow's, and so the step on all ranks.
class Begin : public tf::OpKernel {
 public:
  explicit Begin(tf::OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("graph", &graph_));
    OP_REQUIRES_OK(construction, construction->GetAttr("copies", &copies_));
    OP_REQUIRES_OK(construction, construction->GetAttr("microbatches", &microbatches_));
    OP_REQUIRES_OK(construction, construction->GetAttr("backward", &backward_));
    OP_REQUIRES_OK(construction, construction->GetAttr("names", &names_));
  }

  void Compute(tf::OpKernelContext* context) override {
    const auto arguments = [&] {
      graph::Checksums checksums;
      for (int i = 0; i < context->num_inputs(); ++i) checksums.emplace_back(names_[i], checksum(context->input(i)));
      return checksums;
    };
    failed_here = false;
    OP_REQUIRES_OK(context, status_from([&] { watch(context->cancellation_manager(), begin(arguments)); }));
    tf::Tensor* token = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, tf::TensorShape(), &token));
    token->scalar<float>()() = 0;
  }

 private:
  // With the step of the other border, where it is in both, failing as this one does.
  std::shared_ptr<graph::GraphStep> begin(const graph::StepArguments& arguments) const {
    const auto one_copy = graph::current();
    std::shared_ptr<graph::GraphStep> over_copies;
    if (copies_ != kNone) over_copies = graph::current(graph::Among::kCopies)->begin(copies_, 1, /*backward=*/false);
    if (graph_ == kNone) {
      graph::fail_before(over_copies, one_copy);
      return over_copies;
    }
    try {
      auto step = one_copy->begin(graph_, static_cast<int>(microbatches_), backward_, arguments);
      if (over_copies) graph::fail_together(step, over_copies);
      return step;
    } catch (...) {
      if (over_copies) over_copies->fail(std::current_exception(), graph::GraphStep::Tell::kOthers);
      throw;
    }
  }

  static void watch(tf::CancellationManager* cancels, const std::shared_ptr<graph::GraphStep>& step) {
    if (cancels == nullptr) return;
    const auto fail = [weak = std::weak_ptr(step)] {
      const auto step = weak.lock();
      if (!step || step->error()) return;  // one that is over goes on to be
      failed_here = true;
      step->fail_here();
    };
    const auto token = cancels->get_cancellation_token();
    step->when_it_ends([cancels, token] { cancels->TryDeregisterCallback(token); });
    if (!cancels->RegisterCallback(token, fail)) fail();
  }

  std::int64_t graph_ = kNone;
  std::int64_t copies_ = kNone;
  std::int64_t microbatches_ = 0;
  bool backward_ = false;
  std::vector<std::string> names_;  // of the inputs
};

class End : public tf::OpKernel {
 public:
  explicit End(tf::OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("one_copy", &one_copy_));
    OP_REQUIRES_OK(construction, construction->GetAttr("copies", &copies_));
  }

  void Compute(tf::OpKernelContext* context) override {
    OP_REQUIRES_OK(context, status_from([&] {
                     if (copies_) end(graph::Among::kCopies);
                     if (one_copy_) end(graph::Among::kOneCopy);
                   }));
  }

 private:
  static void end(graph::Among among) {
    const auto border = graph::current(among);
    border->end(border->step());
  }

  bool one_copy_ = true;
  bool copies_ = false;
};

// Scalar tokens, then the shapes that the operator says, then those of inputs that go through.
absl::Status input_shapes(tf::shape_inference::InferenceContext* context) {
  std::vector<tf::PartialTensorShape> shapes;
  TF_RETURN_IF_ERROR(context->GetAttr("shapes", &shapes));
  context->set_output(0, context->Scalar());
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    tf::shape_inference::ShapeHandle shape;
    TF_RETURN_IF_ERROR(context->MakeShapeFromPartialTensorShape(shapes[i], &shape));
    context->set_output(static_cast<int>(i) + 1, shape);
  }
  for (int i = 1; i < context->num_inputs(); ++i) {
    context->set_output(static_cast<int>(shapes.size()) + i, context->input(i));
  }
  return absl::OkStatus();
}

absl::Status output_shapes(tf::shape_inference::InferenceContext* context) {
  const int sent = context->num_inputs() - context->num_outputs();
  context->set_output(0, context->Scalar());
  for (int i = 1; i < context->num_outputs(); ++i) context->set_output(i, context->input(sent + i));
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("SMPBegin")
    .Attr("graph: int = -1")
    .Attr("copies: int = -1")  // a graph over copies
    .Attr("microbatches: int")
    .Attr("backward: bool")
    .Attr("names: list(string)")  // of the arguments of the step function, which are alike on all ranks
    .Attr("T: list(type) >= 0")
    .Input("arguments: T")
    .Output("token: float")
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::ScalarShape);
REGISTER_OP("SMPEnd")
    .Attr("one_copy: bool = true")
    .Attr("copies: bool = false")
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::NoOutputs);
REGISTER_OP("SMPInput")
    .Attr("graph: int")
    .Attr("segment: int")
    .Attr("microbatch: int")
    .Attr("backward: bool")
    .Attr("copies: bool = false")   // of a graph over copies
    .Attr("gradients: list(bool)")  // of those that are received, which have gradients that go back
    .Attr("Treceived: list(type) >= 0")
    .Attr("shapes: list(shape) >= 0")
    .Attr("Tpassed: list(type) >= 0")
    .Input("token: float")
    .Input("passed: Tpassed")
    .Output("next: float")
    .Output("received: Treceived")
    .Output("passed_on: Tpassed")
    .SetIsStateful()
    .SetShapeFn(input_shapes);
REGISTER_OP("SMPOutput")
    .Attr("graph: int")
    .Attr("segment: int")
    .Attr("microbatch: int")
    .Attr("backward: bool")
    .Attr("copies: bool = false")
    .Attr("gradients: list(bool)")
    .Attr("Tsent: list(type) >= 0")
    .Attr("Tpassed: list(type) >= 0")
    .Input("token: float")
    .Input("sent: Tsent")
    .Input("passed: Tpassed")
    .Output("next: float")
    .Output("passed_on: Tpassed")
    .SetIsStateful()
    .SetShapeFn(output_shapes);

REGISTER_KERNEL_BUILDER(Name("SMPBegin").Device(tf::DEVICE_CPU), Begin);
REGISTER_KERNEL_BUILDER(Name("SMPEnd").Device(tf::DEVICE_CPU), End);
REGISTER_KERNEL_BUILDER(Name("SMPInput").Device(tf::DEVICE_CPU), Input);
REGISTER_KERNEL_BUILDER(Name("SMPOutput").Device(tf::DEVICE_CPU), Output);

}  // namespace lamina::operators
