// SPDX-License-Identifier: Apache-2.0
#include "lamina/fused/plugin_rule.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <span>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/fused/plugin.h"

namespace lamina::fused {
namespace {

using base::str;
using base::UsageError;

const LaminaOptimizer& table(const void* context) { return *static_cast<const LaminaOptimizer*>(context); }

const char* check(Hyper hyper, const void* context) { return table(context).check(hyper.data()); }

Coefficients prepare(Hyper hyper, const Moment& moment, Numbers& numbers) {
  Coefficients coefficients{};
  table(moment.context).prepare(hyper.data(), moment.first ? 1 : 0, numbers.data(), coefficients.data());
  return coefficients;
}

void finish(Hyper hyper, const Norms& norms, const Moment& moment, Numbers& numbers, Coefficients& coefficients) {
  table(moment.context).finish(hyper.data(), norms.data(), numbers.data(), coefficients.data());
}

// Every state that is declared is used.
constexpr std::uint32_t kAllStates = (1U << kMostStates) - 1;

// Calls `work` with the chunk, or where its gradients have a scale, of which libraries know nothing, with blocks of it
// and a copy of their gradients.
template <class T, class Work>
void with_scaled(Chunk<T> chunk, const Work& work) {
  if (chunk.gradient_scale == T(1)) return work(chunk);
  std::array<T, kBlock> scaled;
  for (std::size_t left = chunk.count; left > 0; left -= chunk.count) {
    chunk.count = std::min(left, kBlock);
    std::ranges::transform(std::span(chunk.gradient, chunk.count), scaled.begin(),
                           [&](T gradient) { return gradient * chunk.gradient_scale; });
    auto block = chunk;
    block.gradient = scaled.data();
    work(block);
    chunk.parameter += chunk.count;
    chunk.gradient += chunk.count;
    for (T*& state : chunk.states) state = state == nullptr ? nullptr : state + chunk.count;
  }
}

template <auto Update, class T>
void update(const Coefficients& with, const Chunk<T>& chunk) {
  with_scaled(chunk, [&](const Chunk<T>& each) {
    (table(each.context).*Update)(with.data(), each.count, each.parameter, each.gradient, each.states.data());
  });
}

// Measures a chunk, which is a block at most.
template <auto Measure, class T>
void measure(const Coefficients& with, const Chunk<T>& chunk, double* norms) {
  with_scaled(chunk, [&](const Chunk<T>& each) {
    (table(each.context).*Measure)(with.data(), each.count, each.parameter, each.gradient, each.states.data(), norms);
  });
}

Kernel kernel(Hyper) {
  return {.states = kAllStates,
          .update_float = &update<&LaminaOptimizer::update_float, float>,
          .update_double = &update<&LaminaOptimizer::update_double, double>,
          .measure_float = &measure<&LaminaOptimizer::measure_float, float>,
          .measure_double = &measure<&LaminaOptimizer::measure_double, double>};
}

constexpr std::array<Combine, kMostNorms> kSums{Combine::kSum, Combine::kSum};

// Refuses a table that is not complete.
void check_table(const LaminaOptimizer& given, const std::string& path) {
  if (given.version != kLaminaOptimizerVersion) {
    throw UsageError(str(path, " has an optimizer of version ", given.version,
                         " of lamina's interface; this lamina has ", static_cast<int>(kLaminaOptimizerVersion)));
  }
  if (given.name == nullptr || *given.name == '\0') throw UsageError(str(path, ": its optimizer has no name"));
  if (given.state_count > kMostStates || given.number_count > kMostNumbers || given.norm_count > kMostNorms) {
    throw UsageError(str(path, ": ", given.name, " has more than ", kMostStates, " states, ", kMostNumbers,
                         " numbers or ", kMostNorms, " norms"));
  }
  const auto lacks = [](std::uint32_t count, const auto* names, const auto& name_of) {
    for (std::uint32_t i = 0; i < count; ++i) {
      if (names == nullptr || name_of(names[i]) == nullptr) return true;
    }
    return false;
  };
  const auto itself = [](const char* name) { return name; };
  if (lacks(given.hyper_count, given.hyper, [](const LaminaHyper& hyper) { return hyper.name; }) ||
      lacks(given.state_count, given.states, itself) || lacks(given.number_count, given.numbers, itself)) {
    throw UsageError(str(path, ": ", given.name, " lacks names of its hyper-parameters, states or numbers"));
  }
  const bool updates = given.prepare != nullptr && given.update_float != nullptr && given.update_double != nullptr;
  const bool measures = given.measure_float != nullptr && given.measure_double != nullptr && given.finish != nullptr;
  if (!updates || (given.norm_count > 0 && !measures)) {
    throw UsageError(str(path, ": ", given.name, " lacks functions that it needs"));
  }
}

}  // namespace

PluginRule::PluginRule(const std::string& path) : library_(::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL), ::dlclose) {
  if (library_ == nullptr) throw UsageError(str("no optimizer in ", path, ": ", ::dlerror()));
  const auto exported = reinterpret_cast<decltype(&lamina_optimizer)>(::dlsym(library_.get(), "lamina_optimizer"));
  if (exported == nullptr) throw UsageError(str("no optimizer in ", path, ": it does not export lamina_optimizer"));
  const LaminaOptimizer* found = exported();
  if (found == nullptr) throw UsageError(str("no optimizer in ", path, ": lamina_optimizer() returns NULL"));
  const LaminaOptimizer& given = *found;
  check_table(given, path);
  for (std::uint32_t i = 0; i < given.hyper_count; ++i) hyper_.push_back({given.hyper[i].name, given.hyper[i].preset});
  for (std::uint32_t i = 0; i < given.number_count; ++i) states_.push_back({given.numbers[i], StateKind::kNumber});
  for (std::uint32_t i = 0; i < given.state_count; ++i) states_.push_back({given.states[i]});
  rule_ = {.declaration = {.name = given.name,
                           .needs = given.norm_count > 0 ? Needs::kNorms : Needs::kElements,
                           .hyper = hyper_,
                           .states = states_,
                           .norms = std::span(kSums).first(given.norm_count)},
           .context = &given,
           .check = given.check != nullptr ? &check : nullptr,
           .kernel = &kernel,
           .prepare = &prepare,
           .finish = given.norm_count > 0 ? &finish : nullptr};
}

}  // namespace lamina::fused
