// SPDX-License-Identifier: Apache-2.0
// Elements that are stored as they are computed are worked on in place, a chunk at a time. Others pass through blocks
// in the processor's nearest cache: memory is read and written once all the same.
#include "lamina/fused/update.h"

#include <algorithm>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/fused/blocks.h"

namespace lamina::fused {
namespace {

using layout::DType;

// Some elements of a part, whose coefficients stand at this index.
struct Task {
  const Part* part;
  std::size_t coefficients, begin, end;
};

// The tasks of a pass. Many parts have the same coefficients, one after the other.
class Pass {
 public:
  explicit Pass(std::size_t parts) { tasks_.reserve(parts); }

  // Has the parts that follow these coefficients.
  void use(const Coefficients& coefficients) {
    if (coefficients_.empty() || coefficients != coefficients_.back()) coefficients_.push_back(coefficients);
  }

  void add(const Part& part, std::size_t chunk) {
    chunk = std::max(chunk / kBlock, std::size_t{1}) * kBlock;
    for (std::size_t begin = 0; begin < part.count; begin += chunk) {
      tasks_.push_back({&part, coefficients_.size() - 1, begin, std::min(begin + chunk, part.count)});
    }
  }

  // Calls `work` with each task and its coefficients.
  template <class Work>
  void run(Threads& threads, const Work& work) const {
    threads.run(tasks_.size(), [&](std::size_t i) { work(tasks_[i], coefficients_[tasks_[i].coefficients]); });
  }

 private:
  std::vector<Task> tasks_;
  std::vector<Coefficients> coefficients_;
};

bool is_half(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

Coefficients prepared(const Call& call, const Part& part, Numbers& numbers) {
  return call.rule.prepare(call.hyper, call.moment(part.first), numbers);
}

// A part's memory as chunks of T, the type that it is computed in.
template <class T>
class Window {
 public:
  Window(const Part& part, const Kernel& kernel, const Call& call, Vectors vectors)
      : part_(part),
        kernel_(kernel),
        context_(call.rule.context),
        scale_(static_cast<T>(call.gradient_scale)),
        vectors_(vectors) {}

  // Neither gradient nor parameter has to be converted, so that a chunk may be as long as one likes.
  bool in_place() const {
    return !is_half(part_.dtype) && part_.gradient_dtype == part_.dtype && part_.copy == nullptr;
  }

  Chunk<T> load(std::size_t begin, std::size_t end) {
    Chunk<T> chunk{.count = end - begin, .gradient_scale = scale_, .vectors = vectors_, .context = context_};
    chunk.parameter = loaded(part_.parameter, begin, chunk.count, parameter_);
    std::size_t used = 0;
    for (std::size_t k = 0; k < kMostStates; ++k) {
      if (uses(k)) chunk.states[used++] = loaded(part_.states[k], begin, chunk.count, states_[k]);
    }
    if (part_.gradient == part_.parameter) {  // gradients that are measured stand for both
      chunk.gradient = chunk.parameter;
    } else if (part_.gradient_dtype == part_.dtype && !is_half(part_.dtype)) {
      chunk.gradient = static_cast<const T*>(part_.gradient) + begin;
    } else {
      fused::load<T>(part_.gradient_dtype, part_.gradient, begin, chunk.count, gradient_.data(), vectors_);
      chunk.gradient = gradient_.data();
    }
    return chunk;
  }

  void store_states(const Chunk<T>& chunk, std::size_t begin) const {
    if (!is_half(part_.dtype)) return;
    std::size_t used = 0;
    for (std::size_t k = 0; k < kMostStates; ++k) {
      if (uses(k)) fused::store<T>(chunk.states[used++], part_.dtype, part_.states[k], begin, chunk.count, vectors_);
    }
  }

  void store_parameter(const Chunk<T>& chunk, std::size_t begin) const {
    if (is_half(part_.dtype)) {
      fused::store<T>(chunk.parameter, part_.dtype, part_.parameter, begin, chunk.count, vectors_);
    }
    if (part_.copy != nullptr) {
      fused::store<T>(chunk.parameter, part_.copy_dtype, part_.copy, begin, chunk.count, vectors_);
    }
  }

 private:
  using Block = std::array<T, kBlock>;

  bool uses(std::size_t state) const { return (kernel_.states >> state & 1) != 0 && part_.states[state] != nullptr; }

  T* loaded(void* memory, std::size_t begin, std::size_t count, Block& block) {
    if (!is_half(part_.dtype)) return static_cast<T*>(memory) + begin;
    fused::load<T>(part_.dtype, memory, begin, count, block.data(), vectors_);
    return block.data();
  }

  const Part& part_;
  const Kernel& kernel_;
  const void* const context_;
  const T scale_;
  const Vectors vectors_;
  Block parameter_, gradient_;
  std::array<Block, kMostStates> states_;
};

template <class T>
auto update_loop(const Kernel& kernel) {
  if constexpr (std::is_same_v<T, float>) {
    return kernel.update_float;
  } else {
    return kernel.update_double;
  }
}

template <class T>
auto measure_loop(const Kernel& kernel) {
  if constexpr (std::is_same_v<T, float>) {
    return kernel.measure_float;
  } else {
    return kernel.measure_double;
  }
}

template <class T>
void update_task(const Task& task, const Call& call, const Kernel& kernel, const Coefficients& coefficients,
                 Vectors vectors) {
  Window<T> window(*task.part, kernel, call, vectors);
  const std::size_t stride = window.in_place() ? task.end - task.begin : kBlock;
  for (std::size_t begin = task.begin; begin < task.end; begin += stride) {
    const auto chunk = window.load(begin, std::min(begin + stride, task.end));
    update_loop<T>(kernel)(coefficients, chunk);
    window.store_states(chunk, begin);
    window.store_parameter(chunk, begin);
  }
}

// Writes the norms of each block of the task.
template <class T>
void measure_task(const Task& task, const Call& call, const Kernel& kernel, const Coefficients& coefficients,
                  Vectors vectors, Norms* norms) {
  Window<T> window(*task.part, kernel, call, vectors);
  for (std::size_t begin = task.begin; begin < task.end; begin += kBlock) {
    const auto chunk = window.load(begin, std::min(begin + kBlock, task.end));
    measure_loop<T>(kernel)(coefficients, chunk, (norms++)->data());
    window.store_states(chunk, begin);
  }
}

// Calls `work` with a value of the type that elements of `dtype` are computed in.
template <class Work>
void with_computed_type(DType dtype, const Work& work) {
  if (dtype == DType::kFloat64) return work(double());
  work(float());
}

}  // namespace

Vectors widest_vectors() {
#if defined(__x86_64__)
  static const Vectors widest = __builtin_cpu_supports("x86-64-v4")   ? Vectors::kAvx512
                                : __builtin_cpu_supports("x86-64-v3") ? Vectors::kAvx2
                                                                      : Vectors::kBaseline;
  return widest;
#else
  return Vectors::kBaseline;
#endif
}

void check(const Rule& rule, Hyper hyper) {
  check_hyper(rule.declaration, hyper);
  const char* wrong = rule.check != nullptr ? rule.check(hyper, rule.context) : nullptr;
  if (wrong != nullptr) throw base::UsageError(wrong);
}

void measure(const Call& call, std::span<Part> parts, const Workers& workers) {
  const auto combine = call.rule.declaration.norms;
  if (combine.empty()) return;
  const Kernel kernel = call.rule.kernel(call.hyper);
  Pass pass(parts.size());
  std::size_t blocks = 0;
  std::vector<std::size_t> first_block;
  for (const Part& part : parts) {
    Numbers numbers = part.numbers;
    pass.use(prepared(call, part, numbers));
    pass.add(part, workers.chunk);
    first_block.push_back(blocks);
    blocks += (part.count + kBlock - 1) / kBlock;
  }
  std::vector<Norms> of_blocks(blocks);
  pass.run(workers.threads, [&](const Task& task, const Coefficients& coefficients) {
    Norms* norms = of_blocks.data() + first_block[task.part - parts.data()] + task.begin / kBlock;
    with_computed_type(task.part->dtype,
                       [&]<class T>(T) { measure_task<T>(task, call, kernel, coefficients, workers.vectors, norms); });
  });
  const Norms* block = of_blocks.data();
  for (Part& part : parts) {
    part.norms = {};
    for (std::size_t begin = 0; begin < part.count; begin += kBlock, ++block) {
      for (std::size_t k = 0; k < combine.size(); ++k) part.norms[k] = combined(combine[k], part.norms[k], (*block)[k]);
    }
  }
}

void update(const Call& call, std::span<Part> parts, const Workers& workers) {
  const Kernel kernel = call.rule.kernel(call.hyper);
  Pass pass(parts.size());
  const Part* like = nullptr;  // one whose numbers were `before`, as those of most are
  Numbers before{};
  for (Part& part : parts) {
    if (like != nullptr && part.numbers == before && part.first == like->first && call.rule.finish == nullptr) {
      part.numbers = like->numbers;
    } else {
      before = part.numbers;
      auto coefficients = prepared(call, part, part.numbers);
      if (call.rule.finish != nullptr) {
        call.rule.finish(call.hyper, part.norms, call.moment(part.first), part.numbers, coefficients);
      }
      pass.use(coefficients);
      like = &part;
    }
    pass.add(part, workers.chunk);
  }
  pass.run(workers.threads, [&](const Task& task, const Coefficients& coefficients) {
    with_computed_type(task.part->dtype,
                       [&]<class T>(T) { update_task<T>(task, call, kernel, coefficients, workers.vectors); });
  });
}

}  // namespace lamina::fused
