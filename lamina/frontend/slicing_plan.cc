// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/slicing_plan.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <cctype>
#include <memory>
#include <mutex>
#include <utility>

#include "lamina/faces/sayings.h"

namespace lamina {
namespace {

// Models are made before there is a job.
struct Plans {
  struct Entry {
    std::weak_ptr<const torch::nn::Module> module;
    frontend::GivenPlan plan;
  };
  std::mutex mutex;
  std::map<const torch::nn::Module*, Entry> by_module;
};
Plans& plans() {
  static auto* plans = new Plans;
  return *plans;
}

// True for names with dots between them.
bool is_name(const std::string& text) {
  const auto is_letter = [](unsigned char each) { return std::isalpha(each) != 0 || each == '_'; };
  bool begins = true;
  for (const char each : text) {
    if (each == '.' ? begins : !is_letter(each) && (begins || std::isdigit(static_cast<unsigned char>(each)) == 0)) {
      return false;
    }
    begins = each == '.';
  }
  return !begins;
}

std::optional<tensor_parallel::SaidHeads> said_heads(const HeadCount& heads) {
  if (const auto* name = std::get_if<std::string>(&heads)) {
    if (!is_name(*name)) throw faces::refusal("no-heads", base::str("'", *name, "'"));
    return tensor_parallel::SaidHeads{*name, 0};
  }
  const auto count = std::get<std::int64_t>(heads);
  if (count < 0) throw faces::refusal("no-heads", count);
  return count == 0 ? std::nullopt : std::optional(tensor_parallel::SaidHeads{"", count});
}

}  // namespace

void set_tensor_parallelism(const torch::nn::Module& module, SlicingPlan plan, const HeadCount& heads) {
  frontend::GivenPlan given{std::move(plan), said_heads(heads)};
  const auto inside = module.modules(/*include_self=*/false);
  std::lock_guard guard(plans().mutex);
  auto& known = plans().by_module;
  std::erase_if(known, [](const auto& entry) { return entry.second.module.expired(); });
  for (const auto& part : inside) known.erase(part.get());
  known[&module] = {module.weak_from_this(), std::move(given)};
}

std::optional<frontend::GivenPlan> frontend::plan_of(const torch::nn::Module& module) {
  std::lock_guard guard(plans().mutex);
  const auto found = plans().by_module.find(&module);
  if (found == plans().by_module.end() || found->second.module.expired()) return std::nullopt;
  return found->second.plan;
}

}  // namespace lamina
