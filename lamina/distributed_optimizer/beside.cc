// SPDX-License-Identifier: Apache-2.0
#include "lamina/distributed_optimizer/beside.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <iterator>
#include <string>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::distributed_optimizer {
namespace {

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
  const auto told = mailbox.all_gather(ranks, value::List{{shapes, std::move(values)}}, patience);
  const auto& first = told.front().as<value::List>().items;
  for (std::size_t i = 1; i < told.size(); ++i) {
    const auto& theirs = told[i].as<value::List>().items.at(0).as<std::string>();
    if (theirs == first.at(0).as<std::string>()) continue;
    throw base::UsageError(base::str("parameters of an optimizer that are not the model's differ between ranks: rank ",
                                     ranks.front(), " has [", first.at(0).as<std::string>(), "], rank ", ranks[i], " [",
                                     theirs, "]; give every rank's optimizer the same ones, in the same order"),
                           base::Code{"optimizer-differs"});
  }
  if (mailbox.rank() == ranks.front()) return;
  const auto& given = first.at(1).as<value::List>().items;
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
  if (!all_.empty()) give_values(all_, ranks_.one_copy(), ranks_.mailbox, ranks_.patience());
}

}  // namespace lamina::distributed_optimizer
