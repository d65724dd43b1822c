// SPDX-License-Identifier: Apache-2.0
#include "lamina/distributed_optimizer/beside.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <iterator>
#include <string>

#include "lamina/base/error.h"
#include "lamina/base/hash.h"
#include "lamina/base/str.h"
#include "lamina/messaging/agreement.h"

namespace lamina::distributed_optimizer {
namespace {

[[noreturn]] void tell_difference(const std::vector<value::Value>& shapes, std::span<const base::Rank> ranks) {
  const auto& first = shapes.front().as<std::string>();
  const auto other =
      std::ranges::find_if(shapes, [&](const auto& one) { return one.template as<std::string>() != first; });
  base::internal_check(other != shapes.end(), "texts of shapes that differ are alike");
  throw base::UsageError(
      base::str("parameters of an optimizer that are not the model's differ between ranks: rank ", ranks.front(),
                " has [", first, "], rank ", ranks[other - shapes.begin()], " [", other->as<std::string>(),
                "]; give every rank's optimizer the same ones, in the same order"),
      base::Code{"optimizer-differs"});
}

// Collective over `ranks`: gives tensors the values that they have on the first of these.
void give_values(std::span<const at::Tensor> tensors, std::span<const base::Rank> ranks, messaging::Mailbox& mailbox,
                 const base::Patience& patience) {
  if (ranks.size() < 2) return;
  const at::NoGradGuard no_grad;
  std::string shapes;
  value::List values;
  for (const auto& tensor : tensors) {
    shapes += base::str(shapes.empty() ? "" : ", ", tensor.scalar_type(), " ", tensor.sizes());
    if (mailbox.rank() == ranks.front()) values.items.emplace_back(tensor.detach());
  }
  const auto hash = static_cast<std::int64_t>(base::hash64(std::string_view(shapes)));
  const auto led = messaging::hear_first(mailbox, ranks, hash, std::move(values), patience);
  if (!led.are_alike) tell_difference(mailbox.all_gather(ranks, shapes, patience), ranks);
  if (mailbox.rank() == ranks.front()) return;
  const auto& given = led.word.as<value::List>().items;
  for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].detach().copy_(given.at(i).as<at::Tensor>());
}

}  // namespace

void Beside::take(std::span<const at::Tensor> parameters) {
  const auto is_new = [&](const at::Tensor& parameter) {
    return std::ranges::none_of(all_, [&](const auto& known) { return known.is_same(parameter); });
  };
  std::vector<at::Tensor> taken;
  std::ranges::copy_if(parameters, std::back_inserter(taken), is_new);
  if (taken.empty()) return;
  give_values(taken, ranks_.everyone(), ranks_.mailbox, ranks_.patience());
  all_.insert(all_.end(), taken.begin(), taken.end());
}

void Beside::bring() const {
  if (!all_.empty()) give_values(all_, ranks_.pipeline(), ranks_.mailbox, ranks_.patience());
}

}  // namespace lamina::distributed_optimizer
